"""What was seen, in plain sentences that follow from the numbers alone: one for runs that may be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.report.comparable import Conditions, differing_conditions
from merit_lab.report.outcome import (
    SeriesOutcome,
    Spread,
    chance_of_difference,
    deciding_seeds,
    interval_of_difference,
    least_chance,
    least_seeds,
)
from merit_lab.report.series import have_other_data

_LIKELY_CHANCE = 0.05
_MOST_NAMED = 3
_MOST_SEEDS = 100  # that one would ask anybody for


def summarise(outcomes: Sequence[SeriesOutcome]) -> str:
    """Say which series ended lowest, by how much, whether that may be chance, and what failed.

    Series that may not be compared are told in lines of their own, after one that says what they differ in.
    """
    kinds = list(dict.fromkeys(own.series.conditions for own in outcomes))
    if len(kinds) < 2:
        return _sentence(outcomes)
    has_other_data = have_other_data([own.series for own in outcomes])
    lines = [_what_differs(kinds)]
    if has_other_data:
        lines[0] += f" {_say_unit(outcomes)}"
    for kind in kinds:
        comparable = [own for own in outcomes if own.series.conditions == kind]
        lines.append(f"{kind}: {_sentence(comparable, in_bits=has_other_data)}")
    return "\n".join(lines)


def _sentence(outcomes: Sequence[SeriesOutcome], *, in_bits: bool = False) -> str:
    """What came of series that may be compared; the lowest loss ``in_bits`` per byte too."""
    losses = [(own, spread) for own in outcomes if (spread := own.spread("validation_loss"))]
    losses.sort(key=lambda item: item[1].mean)
    ranking = [(own.name, spread) for own, spread in losses]
    bits = losses[0][0].spread("bits_per_byte") if losses and in_bits else None
    unit = f" or {bits.mean:.3f} bits per byte" if bits else ""
    if not ranking:
        clauses = ["No run finished with a validation loss"]
    elif len(ranking) == 1:
        label, spread = ranking[0]
        seeds = count_seeds(len(spread.values))
        clauses = [f"{label} ended at a validation loss of {spread.mean:.3f}{unit} ({seeds})"]
    else:
        clauses = [_compare(ranking, unit)]
    clauses += _logits(outcomes)
    clauses += _failures(outcomes)
    clauses += _repeats(outcomes)
    return "; ".join(clauses) + "."


def _what_differs(kinds: Sequence[Conditions]) -> str:
    """Why there is no winner over all series."""
    differences = [
        f"{name} ({_some([own or 'not recorded' for own in words])})"
        for name, words in differing_conditions(kinds).items()
    ]
    return (
        f"These runs are of {len(kinds)} kinds, which cannot be ranked against each other: they differ in "
        f"{join(differences)}."
    )


def _say_unit(outcomes: Sequence[SeriesOutcome]) -> str:
    """In what unit the losses of different data can be set side by side."""
    if all(own.spread("bits_per_byte") for own in outcomes if own.finished):
        return "Their tokens are not the same, so that losses are told in bits per byte of text too."
    return (
        "Their tokens are not the same, and not every record says how many bytes a token has: these losses "
        "cannot be compared."
    )


def _some(words: Sequence[str]) -> str:
    """The first few of several words, and how many more there are."""
    return join([*words[:_MOST_NAMED], *[f"{len(words) - _MOST_NAMED} more"] * (len(words) > _MOST_NAMED)])


def join(words: Sequence[str]) -> str:
    """Words in a row: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _compare(ranking: Sequence[tuple[str, Spread]], unit: str) -> str:
    (best, lowest), (second, next_lowest) = ranking[:2]
    distances = [f"{spread.mean - lowest.mean:.3f} below {label}" for label, spread in ranking[1:]]
    return (
        f"At the end {best} had the lowest validation loss, {lowest.mean:.3f}{unit} ({join(distances)}; "
        f"{_judge(lowest, next_lowest, f'{best} and {second}' if len(ranking) > 2 else '')})"
    )


def _judge(lowest: Spread, next_lowest: Spread, pair: str) -> str:
    """Whether the difference between the best two may be chance. ``pair`` names them where there are more."""
    first, second = lowest.values, next_lowest.values
    others = "each" if len(first) == len(second) else f"and {count_seeds(len(second))}"
    seeds = f"{count_seeds(len(first))} {others}"
    between = f" between {pair}" if pair else ""
    chance = chance_of_difference(first, second)
    if chance is None:
        needed = f"from {least_seeds(_LIKELY_CHANCE)} seeds each on a test can tell"
        return f"{seeds}, so the difference{between} may be chance; {needed}"
    verdict = f"{seeds}, p = {chance:.2g}{between} in a permutation test"
    may_be_chance = chance > _LIKELY_CHANCE
    if may_be_chance and math.isclose(chance, least_chance(len(first), len(second))):
        verdict += f", the least that {seeds} can give"
    elif may_be_chance:
        verdict += ", so that difference may be chance"
    clauses = [verdict]
    if interval := interval_of_difference(first, second):
        clauses.append(f"95% interval of that difference {interval[0]:.3f} to {interval[1]:.3f}")
    if may_be_chance and (number := deciding_seeds(first, second, _LIKELY_CHANCE)):
        count = f"more than {_MOST_SEEDS}" if number > _MOST_SEEDS else f"{number}"
        clauses.append(f"{count} seeds each would decide if it stays as it is")
    return "; ".join(clauses)


def count_seeds(num_seeds: int) -> str:
    """A number of seeds in words."""
    return "one seed" if num_seeds == 1 else f"{num_seeds} seeds"


def _logits(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    logits = [(own.name, spread.mean) for own in outcomes if (spread := own.spread("final_logit"))]
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
            clauses.append(f"{own.name} diverged{runs} (at step {steps})")
        for runs_left_out, what in (
            (own.unfinished, "did not finish"),
            (own.not_validated, "finished without validation"),
        ):
            if runs_left_out:
                runs = own.name if total == 1 else f"{len(runs_left_out)} of {total} {own.name} runs"
                are = "is" if len(runs_left_out) == 1 else "are"
                clauses.append(f"{runs} {what} and {are} not counted")
    return clauses


def _repeats(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    """The runs that were left out, since a seed counts once."""
    runs = [f"{run.name} ({run.status})" for own in outcomes for run in own.series.repeats]
    if not runs:
        return []
    have, are = ("run has", "is") if len(runs) == 1 else ("runs have", "are")
    return [f"{len(runs)} {have} the settings and the seed of another and {are} not counted: {_some(runs)}"]
