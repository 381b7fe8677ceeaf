"""What was seen, in one plain sentence that follows from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.report.outcome import SeriesOutcome, Spread, chance_of_difference

_LIKELY_CHANCE = 0.05
_MOST_NAMED = 3


def summarise(outcomes: Sequence[SeriesOutcome]) -> str:
    """Say which series ended lowest, by how much, whether that may be chance, and what failed."""
    losses = [(own.label, spread) for own in outcomes if (spread := own.spread("validation_loss"))]
    ranking = sorted(losses, key=lambda item: item[1].mean)
    if not ranking:
        clauses = ["No run finished with a validation loss"]
    elif len(ranking) == 1:
        label, spread = ranking[0]
        seeds = count_seeds(len(spread.values))
        clauses = [f"{label} ended at a validation loss of {spread.mean:.3f} ({seeds})"]
    else:
        clauses = [_compare(ranking)]
    clauses += _logits(outcomes)
    clauses += _failures(outcomes)
    clauses += _lengths(outcomes)
    clauses += _repeats(outcomes)
    return "; ".join(clauses) + "."


def join(words: Sequence[str]) -> str:
    """Words in a row: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _compare(ranking: Sequence[tuple[str, Spread]]) -> str:
    (best, lowest), (second, next_lowest) = ranking[:2]
    distances = [f"{spread.mean - lowest.mean:.3f} below {label}" for label, spread in ranking[1:]]
    return (
        f"At the end {best} had the lowest validation loss, {lowest.mean:.3f} ({join(distances)}; "
        f"{_judge(lowest, next_lowest, f'{best} and {second}' if len(ranking) > 2 else '')})"
    )


def _judge(lowest: Spread, next_lowest: Spread, pair: str) -> str:
    """Whether the difference between the best two may be chance. ``pair`` names them where there are more."""
    num_seeds, num_others = len(lowest.values), len(next_lowest.values)
    others = "each" if num_others == num_seeds else f"and {count_seeds(num_others)}"
    seeds = f"{count_seeds(num_seeds)} {others}"
    between = f" between {pair}" if pair else ""
    chance = chance_of_difference(lowest.values, next_lowest.values)
    if chance is None:
        return f"{seeds}, so the difference{between} may be chance"
    verdict = f"{seeds}, p = {chance:.2g}{between} in a permutation test"
    return verdict if chance <= _LIKELY_CHANCE else f"{verdict}, so that difference may be chance"


def count_seeds(num_seeds: int) -> str:
    """A number of seeds in words."""
    return "one seed" if num_seeds == 1 else f"{num_seeds} seeds"


def _logits(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    logits = [(own.label, spread.mean) for own in outcomes if (spread := own.spread("final_logit"))]
    if not logits:
        return []
    words = [f"{_logit(value)} with {label}" for label, value in sorted(logits, key=lambda item: item[1])]
    return [f"the largest attention logit was then {join(words)}"]


def _logit(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _failures(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    clauses = []
    for own in outcomes:
        total = len(own.runs)
        if own.diverged:
            runs = "" if total == 1 else f" in {len(own.diverged)} of {total} runs"
            steps = join([str(run.step) for run in own.diverged])
            clauses.append(f"{own.label} diverged{runs} (at step {steps})")
        for runs_left_out, what in (
            (own.unfinished, "did not finish"),
            (own.not_validated, "finished without validation"),
        ):
            if runs_left_out:
                runs = own.label if total == 1 else f"{len(runs_left_out)} of {total} {own.label} runs"
                are = "is" if len(runs_left_out) == 1 else "are"
                clauses.append(f"{runs} {what} and {are} not counted")
    return clauses


def _lengths(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    """A warning where runs of different lengths stand beside each other."""
    tokens = [run.tokens for own in outcomes for run in own.finished]
    if not tokens or math.isclose(min(tokens), max(tokens)):
        return []
    return [f"the runs are not of one length ({min(tokens):,} to {max(tokens):,} tokens)"]


def _repeats(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    """The runs that were left out, since a seed counts once."""
    runs = [f"{run.name} ({run.status})" for own in outcomes for run in own.series.repeats]
    if not runs:
        return []
    have, are = ("run has", "is") if len(runs) == 1 else ("runs have", "are")
    named = runs[:_MOST_NAMED] + [f"{len(runs) - _MOST_NAMED} more"] * (len(runs) > _MOST_NAMED)
    return [f"{len(runs)} {have} the settings and the seed of another and {are} not counted: {join(named)}"]
