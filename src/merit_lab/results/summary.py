"""Summarise outcomes in plain sentences: one for each group of runs that may be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.results.comparable import Conditions, differing_conditions
from merit_lab.results.old_series import have_other_data
from merit_lab.results.outcome import (
    SeriesOutcome,
    Spread,
    deciding_seeds,
    fewest_seeds,
    interval_of_difference,
    p_value_of_difference,
    smallest_p_value,
)
from merit_lab.text import count_seeds, join

_SIGNIFICANCE = 0.05
_MOST_NAMED = 3
_MOST_COMPARED = 6  # series whose values are all given
_LONG_NAMES = 120  # letters; of series with longer ones only the extremes are named
_MOST_SEEDS = 100  # more are not given as a number


def summarise(outcomes: Sequence[SeriesOutcome]) -> str:
    """Say which series ended lowest, by how much, whether that may be chance, and what failed.

    Series that may not be compared get separate lines, after one that says what they differ in.
    """
    groups = list(dict.fromkeys(outcome.series.conditions for outcome in outcomes))
    if len(groups) < 2:
        return _sentence(outcomes)
    has_other_data = have_other_data([outcome.series for outcome in outcomes])
    lines = [_differences(groups)]
    if has_other_data:
        lines[0] += f" {_unit_note(outcomes)}"
    for conditions in groups:
        comparable = [outcome for outcome in outcomes if outcome.series.conditions == conditions]
        lines.append(f"{conditions}: {_sentence(comparable, in_bits=has_other_data)}")
    return "\n".join(lines)


def _sentence(outcomes: Sequence[SeriesOutcome], *, in_bits: bool = False) -> str:
    """Summarise series that may be compared; ``in_bits``, with the lowest loss in bits per byte too."""
    losses = [(outcome, spread) for outcome in outcomes if (spread := outcome.spread("validation_loss"))]
    losses.sort(key=lambda item: item[1].mean)
    ranking = [(outcome.name, spread) for outcome, spread in losses]
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


def _differences(groups: Sequence[Conditions]) -> str:
    """Why there is no winner over all series."""
    differences = [
        f"{name} ({_some([value or 'not recorded' for value in values])})"
        for name, values in differing_conditions(groups).items()
    ]
    return (
        f"These runs form {len(groups)} groups, which cannot be ranked against each other: they differ in "
        f"{join(differences)}."
    )


def _unit_note(outcomes: Sequence[SeriesOutcome]) -> str:
    """The unit in which losses on different data can be compared, if there is one."""
    if all(outcome.spread("bits_per_byte") for outcome in outcomes if outcome.finished):
        return "Their tokens differ, so losses are also given in bits per byte of text."
    return (
        "Their tokens differ, and not every record has the number of bytes per token, so these losses cannot "
        "be compared."
    )


def _some(items: Sequence[str]) -> str:
    """The first few items, and how many more there are."""
    return join([*items[:_MOST_NAMED], *[f"{len(items) - _MOST_NAMED} more"] * (len(items) > _MOST_NAMED)])


def _compare(ranking: Sequence[tuple[str, Spread]], unit: str) -> str:
    (best, lowest), (second, next_lowest) = ranking[:2]
    distances = [_distance(spread.mean - lowest.mean, label) for label, spread in ranking[1:]]
    has_long_names = _are_long([label for label, _ in ranking])
    if len(ranking) > _MOST_COMPARED or has_long_names:
        num_named = 1 if has_long_names else _MOST_NAMED
        more = len(distances) - num_named
        distances = [*distances[:num_named], *[f"below {more} more"] * bool(more)]
    pair = "the first two" if has_long_names else f"{best} and {second}"
    return (
        f"At the end {best} had the lowest validation loss, {lowest.mean:.3f}{unit} ({join(distances)}; "
        f"{_judge(lowest, next_lowest, pair if len(ranking) > 2 else '')})"
    )


def _distance(rise: float, label: str) -> str:
    return f"the same as {label}" if rise == 0 else f"{rise:.3f} below {label}"


def _are_long(names: Sequence[str]) -> bool:
    return sum(map(len, names)) > _LONG_NAMES


def _judge(lowest: Spread, next_lowest: Spread, pair: str) -> str:
    """Whether the difference between the best two may be chance. ``pair`` names them if there are more."""
    first, second = lowest.values, next_lowest.values
    others = "each" if len(first) == len(second) else f"and {count_seeds(len(second))}"
    seeds = f"{count_seeds(len(first))} {others}"
    between = f" between {pair}" if pair else ""
    p_value = p_value_of_difference(first, second)
    if p_value is None:
        needed = f"a test needs at least {fewest_seeds(_SIGNIFICANCE)} seeds each"
        return f"{seeds}, so the difference{between} may be chance; {needed}"
    verdict = f"{seeds}, p = {p_value:.2g}{between} in a permutation test"
    may_be_chance = p_value > _SIGNIFICANCE
    if may_be_chance and math.isclose(p_value, smallest_p_value(len(first), len(second))):
        verdict += f", the smallest possible with {seeds}"
    elif may_be_chance:
        verdict += ", so that difference may be chance"
    clauses = [verdict]
    if interval := interval_of_difference(first, second):
        clauses.append(f"95% interval of that difference {interval[0]:.3f} to {interval[1]:.3f}")
    if may_be_chance and (number := deciding_seeds(first, second, _SIGNIFICANCE)):
        count = f"more than {_MOST_SEEDS}" if number > _MOST_SEEDS else f"{number}"
        clauses.append(f"{count} seeds each would decide if difference and spread stay the same")
    return "; ".join(clauses)


def _logits(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    logits = [
        (outcome.name, spread.mean) for outcome in outcomes if (spread := outcome.spread("final_logit"))
    ]
    if not logits:
        return []
    logits.sort(key=lambda item: item[1])
    values = [f"{_logit(value)} with {label}" for label, value in logits]
    if len(values) > _MOST_COMPARED or (len(values) > 2 and _are_long([label for label, _ in logits])):
        return [f"the largest attention logit was then between {values[0]} and {values[-1]}"]
    return [f"the largest attention logit was then {join(values)}"]


def _logit(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _failures(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    clauses = []
    for outcome in outcomes:
        total = len(outcome.runs)
        if outcome.diverged:
            runs = "" if total == 1 else f" in {len(outcome.diverged)} of {total} runs"
            steps = join([str(run.step) for run in outcome.diverged])
            clauses.append(f"{outcome.name} diverged{runs} (at step {steps})")
        for runs_left_out, reason in (
            (outcome.unfinished, "did not finish"),
            (outcome.not_validated, "finished without validation"),
        ):
            if runs_left_out:
                runs = outcome.name if total == 1 else f"{len(runs_left_out)} of {total} {outcome.name} runs"
                are = "is" if len(runs_left_out) == 1 else "are"
                clauses.append(f"{runs} {reason} and {are} not counted")
    return clauses


def _repeats(outcomes: Sequence[SeriesOutcome]) -> list[str]:
    """The runs that were left out because a seed counts once."""
    runs = [f"{run.name} ({run.status})" for outcome in outcomes for run in outcome.series.repeats]
    if not runs:
        return []
    have, are = ("run has", "is") if len(runs) == 1 else ("runs have", "are")
    return [f"{len(runs)} {have} the settings and the seed of another and {are} not counted: {_some(runs)}"]
