"""What each run and each series came to: the numbers of the table and of the summary."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from merit_lab.record import Status
from merit_lab.report.curves import MAX_LOGIT, Curves, finite, last_validation_loss
from merit_lab.report.gather import MeasuredRun
from merit_lab.report.series import Series

_MOST_WAYS = 20_000  # to deal out eight runs on each side; drawn by lot, a p-value of 0.05 is right to 0.003

_CONFIDENCE = 0.95
_POWER = 0.8


@dataclass(frozen=True)
class RunOutcome:
    """One run's last values; None where nothing finite was recorded."""

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
    """A quantity over the finished runs of a series."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for a single run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class SeriesOutcome:
    """A series' runs, and the spread of what the finished ones came to."""

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
        """The spread of an attribute of RunOutcome; None where no finished run has it."""
        values = [getattr(run, quantity) for run in self.finished]
        present = tuple(value for value in values if value is not None)
        return Spread(present) if present else None


def read_outcomes(series: Sequence[Series]) -> list[SeriesOutcome]:
    """The outcome of every series."""
    return [SeriesOutcome(own, tuple(_run_outcome(run) for run in own.runs)) for own in series]


def _run_outcome(run: MeasuredRun) -> RunOutcome:
    curves = run.curves
    training = run.rows.get("train", [])
    steps = [row["step"] for row in [*training, *run.rows.get("validation", [])]]
    speeds = [value for _, value in finite(curves.get("tokens_per_second", []))]
    logits = [value for _, value in finite(curves.get(MAX_LOGIT, []))]
    loss = _last(curves, "validation_loss")
    messages = [row["message"] for row in run.rows.get("event", []) if row["what"] == run.status]
    return RunOutcome(
        name=run.name,
        seed=run.seed,
        status=run.status,
        step=max(steps, default=0),
        tokens=max((row["tokens"] for row in training), default=0),
        seconds=training[-1].get("seconds") if training else None,
        validation_loss=loss,
        training_loss=_last(curves, "training_loss"),
        final_logit=logits[-1] if logits else None,
        largest_logit=max(logits, default=None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        message=messages[-1] if messages else _complaint(run),
        bits_per_byte=None if loss is None or run.bits_per_byte is None else loss * run.bits_per_byte,
    )


def _complaint(run: MeasuredRun) -> str:
    """Why a run counts as diverged that did not say so itself."""
    loss = last_validation_loss(run.rows)
    return f"the last validation loss is {loss}" if run.status == "diverged" and loss is not None else ""


def _last(curves: Curves, name: str) -> float | None:
    points = finite(curves.get(name, []))
    return points[-1][1] if points else None


def chance_of_difference(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The p-value of a permutation test of a difference between two means.

    The share of the ways to deal the values out to two groups of these sizes that put the means at
    least as far apart; of ways drawn by lot, always the same, where there are too many to go through. None
    where a group has a single value: then there is no spread to judge by.
    """
    from scipy import stats  # type: ignore[import-untyped]

    if min(len(first), len(second)) < 2:
        return None
    ways = {"n_resamples": _MOST_WAYS, "rng": 0}
    return float(stats.permutation_test((first, second), _distance, alternative="greater", **ways).pvalue)


def least_chance(num_first: int, num_second: int) -> float:
    """The least p-value that this test can give, when the groups do not overlap.

    Only one way to deal out puts the means as far apart, and its mirror where the groups are of one size.
    """
    return (2 if num_first == num_second else 1) / math.comb(num_first + num_second, num_first)


def least_seeds(chance: float) -> int:
    """With how many seeds each the test can give a p-value of ``chance`` at all."""
    return next(size for size in itertools.count(2) if least_chance(size, size) <= chance)


def interval_of_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the second mean less the first, by Welch's t; None where there is no spread."""
    from scipy import stats

    sizes, values = (len(first), len(second)), (first, second)
    if min(sizes) < 2:
        return None
    errors = [statistics.variance(own) / len(own) for own in values]
    if sum(errors) == 0:
        return None
    freedom = sum(errors) ** 2 / sum(own**2 / (size - 1) for own, size in zip(errors, sizes, strict=True))
    middle = statistics.fmean(second) - statistics.fmean(first)
    half = float(stats.t.ppf(0.5 + _CONFIDENCE / 2, freedom)) * math.sqrt(sum(errors))
    return middle - half, middle + half


def deciding_seeds(first: Sequence[float], second: Sequence[float], chance: float) -> int | None:
    """With how many seeds each such a difference is found four times in five, at a p-value of ``chance``.

    A forecast by the normal distribution, which takes the difference and the spread for what they seem; more
    than there are, and no fewer than the test needs. None where there is no difference to find.
    """
    from scipy import stats

    distance = abs(statistics.fmean(first) - statistics.fmean(second))
    if distance == 0:
        return None
    spread = math.sqrt(statistics.fmean([statistics.variance(own) for own in (first, second)]))
    both = float(stats.norm.ppf(1 - chance / 2) + stats.norm.ppf(_POWER))
    found = math.ceil(2 * (both * spread / distance) ** 2)
    return max(found, least_seeds(chance), len(first) + 1, len(second) + 1)


def _distance(first: Any, second: Any, axis: int) -> Any:
    return abs(first.mean(axis) - second.mean(axis))
