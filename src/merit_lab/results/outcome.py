"""Final numbers of each run and each series, for the table and the summary."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from merit_lab.results.curves import MAX_LOGIT, last_validation_loss
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.old_series import Series
from merit_lab.runs import Status

# Enough for all relabellings of eight runs on each side. If sampled, a p-value of 0.05 is right to 0.003.
_MAX_RELABELLINGS = 20_000

_CONFIDENCE = 0.95
_POWER = 0.8


@dataclass(frozen=True)
class RunOutcome:
    """One run's last values; None if nothing finite was recorded."""

    name: str
    seed: int
    status: Status
    step: int
    tokens: int
    seconds: float | None
    validation_loss: float | None
    training_loss: float | None
    final_logit: float | None
    largest_logit: float | None
    tokens_per_second: float | None
    message: str
    bits_per_byte: float | None = None  # the validation loss in a unit that tokenizers share

    @property
    def finished(self) -> bool:
        """Whether the run's last values may enter a mean."""
        return self.status == "finished" and self.validation_loss is not None


@dataclass(frozen=True)
class Spread:
    """A quantity over several runs."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for a single run, or if a value is infinite."""
        has_spread = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if has_spread else None

    def text(self, number: str) -> str:
        """The mean and, if there is one, the deviation, in a format such as ".3f"."""
        deviation = "" if self.deviation is None else f" ± {self.deviation:{number}}"
        return f"{self.mean:{number}}{deviation}"


@dataclass(frozen=True)
class SeriesOutcome:
    """The outcomes of a series' runs, and their spread over the finished ones."""

    series: Series
    runs: tuple[RunOutcome, ...]

    @property
    def name(self) -> str:
        return self.series.name

    @property
    def label(self) -> str:
        return self.series.label

    @property
    def finished(self) -> tuple[RunOutcome, ...]:
        return tuple(run for run in self.runs if run.finished)

    @property
    def diverged(self) -> tuple[RunOutcome, ...]:
        return tuple(run for run in self.runs if run.status == "diverged")

    @property
    def unfinished(self) -> tuple[RunOutcome, ...]:
        return tuple(run for run in self.runs if run.status not in ("finished", "diverged"))

    @property
    def not_validated(self) -> tuple[RunOutcome, ...]:
        return tuple(run for run in self.runs if run.status == "finished" and run.validation_loss is None)

    def spread(self, quantity: str) -> Spread | None:
        """The spread of an attribute of RunOutcome; None if no finished run has it."""
        values = [getattr(run, quantity) for run in self.finished]
        present = tuple(value for value in values if value is not None)
        return Spread(present) if present else None


def read_outcomes(all_series: Sequence[Series]) -> list[SeriesOutcome]:
    """The outcome of every series."""
    return [SeriesOutcome(series, tuple(_run_outcome(run) for run in series.runs)) for series in all_series]


def _run_outcome(run: MeasuredRun) -> RunOutcome:
    training = run.rows.get("train", [])
    steps = [row["step"] for row in [*training, *run.rows.get("validation", [])]]
    speeds = [value for _, value in run.points("tokens_per_second")]
    logits = [value for _, value in run.points(MAX_LOGIT)]
    loss = _last(run, "validation_loss")
    messages = [row["message"] for row in run.rows.get("event", []) if row["what"] == run.status]
    return RunOutcome(
        name=run.name,
        seed=run.seed,
        status=run.status,
        step=max(steps, default=0),
        tokens=max((row["tokens"] for row in training), default=0),
        seconds=training[-1].get("seconds") if training else None,
        validation_loss=loss,
        training_loss=_last(run, "training_loss"),
        final_logit=logits[-1] if logits else None,
        largest_logit=max(logits, default=None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        message=messages[-1] if messages else _complaint(run),
        bits_per_byte=None if loss is None or run.bits_per_byte is None else loss * run.bits_per_byte,
    )


def _complaint(run: MeasuredRun) -> str:
    """Why a run counts as diverged although it recorded no such event."""
    loss = last_validation_loss(run.rows)
    return f"the last validation loss is {loss}" if run.status == "diverged" and loss is not None else ""


def _last(run: MeasuredRun, curve: str) -> float | None:
    points = run.points(curve)
    return points[-1][1] if points else None


def p_value_of_difference(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The p-value of a permutation test of a difference between two means.

    The share of relabellings into groups of these sizes whose means are at least as far apart. If there are
    too many to enumerate, a fixed random sample is used. None if a group has a single value, since there is
    no spread to judge by.
    """
    from scipy import stats  # type: ignore[import-untyped]

    if min(len(first), len(second)) < 2:
        return None
    resampling = {"n_resamples": _MAX_RELABELLINGS, "rng": 0}
    return float(
        stats.permutation_test((first, second), _distance, alternative="greater", **resampling).pvalue
    )


def smallest_p_value(num_first: int, num_second: int) -> float:
    """The smallest p-value that this test can give, when the groups do not overlap.

    Only one relabelling has means as far apart, and its mirror image if the groups have the same size.
    """
    return (2 if num_first == num_second else 1) / math.comb(num_first + num_second, num_first)


def fewest_seeds(p_value: float) -> int:
    """The fewest seeds per series with which the test can give ``p_value`` or less."""
    return next(size for size in itertools.count(2) if smallest_p_value(size, size) <= p_value)


def interval_of_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the second mean less the first, by Welch's t; None if there is no spread."""
    from scipy import stats

    sizes, values = (len(first), len(second)), (first, second)
    if min(sizes) < 2:
        return None
    errors = [statistics.variance(sample) / len(sample) for sample in values]
    if sum(errors) == 0:
        return None
    freedom = sum(errors) ** 2 / sum(error**2 / (size - 1) for error, size in zip(errors, sizes, strict=True))
    middle = statistics.fmean(second) - statistics.fmean(first)
    half = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, freedom)) * math.sqrt(sum(errors))
    return middle - half, middle + half


def deciding_seeds(first: Sequence[float], second: Sequence[float], p_value: float) -> int | None:
    """The seeds per series that would find this difference four times in five, at ``p_value``.

    A forecast by the normal distribution that takes the observed difference and spread as true. It is more
    than there are now, and no fewer than the test needs. None if there is no difference to find.
    """
    from scipy import stats

    distance = abs(statistics.fmean(first) - statistics.fmean(second))
    if distance == 0:
        return None
    spread = math.sqrt(statistics.fmean([statistics.variance(sample) for sample in (first, second)]))
    both = float(stats.norm.ppf(1 - p_value / 2) + stats.norm.ppf(_POWER))
    needed = math.ceil(2 * (both * spread / distance) ** 2)
    return max(needed, fewest_seeds(p_value), len(first) + 1, len(second) + 1)


def _distance(first: Any, second: Any, axis: int) -> Any:
    return abs(first.mean(axis) - second.mean(axis))
