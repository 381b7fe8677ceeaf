"""The tables of a report, as rows of text: outcomes, evaluations, settings, environment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merit_lab.results.comparable import HASH_DIGITS, data_names
from merit_lab.results.old_series import Series, have_other_data
from merit_lab.results.outcome import RunOutcome, SeriesOutcome, Spread
from merit_lab.runs.settings import differing, flatten, show
from merit_lab.tables import NOTHING, Table

# Facts about a person's machine that say nothing about the result, and what is too long to show: all options
# of all parameter groups.
_NOT_SHOWN = ("command", "folder", "host", "data.folder", "optimizer")


@dataclass(frozen=True)
class SettingsComparison:
    """The settings that all runs share, and those that differ, by series."""

    common: tuple[tuple[str, str], ...]
    different: Table | None


def series_table(outcomes: Sequence[SeriesOutcome]) -> Table:
    """One row for each series: means and spread of the finished runs, and the statuses of all."""
    rows = []
    in_bits = have_other_data([outcome.series for outcome in outcomes])
    for outcome in outcomes:
        loss = outcome.spread("validation_loss")
        bits = {"Bits per byte": _mean(outcome.spread("bits_per_byte"), 3)} if in_bits else {}
        rows.append(
            {
                "Optimizer": outcome.label,
                "Runs": describe_runs(outcome),
                "Peak learning rate": NOTHING if outcome.series.lr is None else f"{outcome.series.lr:g}",
                "Validation loss": _mean(loss, 3),
                **bits,
                "Lowest to highest": _range(loss, 3),
                "Training loss": _mean(outcome.spread("training_loss"), 3),
                "Largest logit at the end": _mean(outcome.spread("final_logit"), 1),
                "At any time": _mean(outcome.spread("largest_logit"), 1),
                "Tokens/s": _mean(outcome.spread("tokens_per_second"), 0, with_deviation=False),
            }
        )
    if all(row["Lowest to highest"] == NOTHING for row in rows):
        for row in rows:
            del row["Lowest to highest"]
    return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), num_text=2)


def describe_runs(outcome: SeriesOutcome) -> str:
    """How many runs of a series finished, diverged, or did neither."""
    kinds = {
        "finished": outcome.finished,
        "finished without validation": outcome.not_validated,
        "diverged": outcome.diverged,
        "unfinished": outcome.unfinished,
    }
    return ", ".join(f"{len(runs)} {kind}" for kind, runs in kinds.items() if runs)


def run_table(outcomes: Sequence[SeriesOutcome]) -> Table:
    """One row for each run, with its last values, whatever its status."""
    head = (
        "Run",
        "Series",
        "Status",
        "Seed",
        "Steps",
        "Validation loss",
        "Training loss",
        "Largest logit at the end",
        "At any time",
        "Tokens/s",
        "Minutes",
    )
    rows = [_run_row(outcome.label, run) for outcome in outcomes for run in outcome.runs]
    return Table(head, tuple(rows), num_text=3)


def _run_row(label: str, run: RunOutcome) -> tuple[str, ...]:
    status = f"{run.status}: {run.message}" if run.status == "diverged" and run.message else run.status
    return (
        run.name,
        label,
        status,
        str(run.seed),
        f"{run.step:,}",
        _number(run.validation_loss, 3),
        _number(run.training_loss, 3),
        _number(run.final_logit, 1),
        _number(run.largest_logit, 1),
        _number(run.tokens_per_second, 0),
        _number(None if run.seconds is None else run.seconds / 60, 1),
    )


def evaluation_table(all_series: Sequence[Series]) -> Table | None:
    """One row for each measure of each set, and one column for each series; None if nothing was evaluated.

    A set that was not evaluated whole has rows of its own.
    """
    evaluated = [series for series in all_series if any(run.evaluations for run in series.runs)]
    if not evaluated:
        return None
    measures: dict[tuple[str, str, int], list[list[Any]]] = {}
    for place, series in enumerate(evaluated):
        for run in series.runs:
            # A set with fewer items than a limit may have been evaluated with the limit and without.
            once = {(result.name, result.num_items): result for result in run.evaluations}
            for (name, num_items), result in once.items():
                for measure, metric in result.metrics.items():
                    key = name, measure, num_items
                    measures.setdefault(key, [[] for _ in evaluated])[place].append(metric)
    steps = (
        dict.fromkeys(f"{result.step:,}" for run in series.runs for result in run.evaluations)
        for series in evaluated
    )
    rows = [("Step", "", "", "", *map(", ".join, steps))]
    for (name, measure, num_items), by_series in measures.items():
        better = _better([metric for metrics in by_series for metric in metrics])
        rows.append((name, measure, better, f"{num_items:,}", *map(_evaluated, by_series)))
    head = ("Set", "Measure", "Better", "Items", *(series.label for series in evaluated))
    return Table(head, tuple(rows), num_text=3)


def _better(metrics: Iterable[Any]) -> str:
    directions = {metric.higher_is_better for metric in metrics}
    return "higher" if directions == {True} else "lower" if directions == {False} else NOTHING


def _evaluated(metrics: Sequence[Any]) -> str:
    """One run with its error over items, or the mean of several with the deviation over seeds."""
    if not metrics:
        return NOTHING
    spread = Spread(tuple(metric.value for metric in metrics))
    return with_error(spread.mean, metrics[0].stderr if len(metrics) == 1 else spread.deviation)


def with_error(value: float, error: float | None) -> str:
    """A value with its error: two digits of the error, and as many decimals of the value.

    Examples:
        >>> with_error(415.704, 19.58), with_error(0.126722, 0.004635), with_error(1.236, None)
        ('416 ± 20', '0.1267 ± 0.0046', '1.236')
    """
    if error is None:
        return f"{value:.4g}"
    if not 0 < error < math.inf:
        return f"{value:.4g} ± {error:g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def settings(all_series: Sequence[Series]) -> SettingsComparison:
    """The configurations, with the data by name."""
    names = data_names(run for series in all_series for run in series.runs)
    tables = [
        [{**run.settings, "data": names.get(run.fingerprint or "")} for run in series.runs]
        for series in all_series
    ]
    return _compare(all_series, tables)


def environment(all_series: Sequence[Series]) -> SettingsComparison:
    """The environments, as far as they are shown."""
    tables = [
        [
            {path: value for path, value in flatten(run.environment).items() if path not in _NOT_SHOWN}
            for run in series.runs
        ]
        for series in all_series
    ]
    return _compare(all_series, tables)


def _compare(
    all_series: Sequence[Series], tables: Sequence[Sequence[Mapping[str, object]]]
) -> SettingsComparison:
    everything = [table for group in tables for table in group]
    paths = differing(everything)
    common = tuple((path, show(value)) for path, value in everything[0].items() if path not in paths)
    if not paths:
        return SettingsComparison(common, None)
    rows = tuple((path, *(_values(group, path) for group in tables)) for path in paths)
    return SettingsComparison(
        common, Table(("", *(series.label for series in all_series)), rows, num_text=1 + len(all_series))
    )


def _values(group: Sequence[Mapping[str, object]], path: str) -> str:
    values = dict.fromkeys(show(table[path]) if path in table else NOTHING for table in group)
    is_hash = path.rpartition(".")[2] == "fingerprint"
    return " | ".join(value[:HASH_DIGITS] if is_hash else value for value in values)


def _mean(spread: Spread | None, digits: int, *, with_deviation: bool = True) -> str:
    if spread is None:
        return NOTHING
    return spread.text(f",.{digits}f") if with_deviation else _number(spread.mean, digits)


def _range(spread: Spread | None, digits: int) -> str:
    if spread is None or len(spread.values) < 2:
        return NOTHING
    return f"{_number(min(spread.values), digits)} to {_number(max(spread.values), digits)}"


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"
