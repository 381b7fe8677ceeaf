"""What each run and each series came to: the numbers of the table and of the summary."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from merit_lab.record import Status
from merit_lab.report.curves import MAX_LOGIT, Curves, finite, last_validation_loss
from merit_lab.report.gather import MeasuredRun, Series

_MOST_WAYS = 20_000  # to deal out eight runs on each side; drawn by lot, a p-value of 0.05 is right to 0.003


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
    messages = [row["message"] for row in run.rows.get("event", []) if row["what"] == run.status]
    return RunOutcome(
        name=run.name,
        seed=run.seed,
        status=run.status,
        step=max(steps, default=0),
        tokens=max((row["tokens"] for row in training), default=0),
        seconds=training[-1].get("seconds") if training else None,
        validation_loss=_last(curves, "validation_loss"),
        training_loss=_last(curves, "training_loss"),
        final_logit=logits[-1] if logits else None,
        largest_logit=max(logits, default=None),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        message=messages[-1] if messages else _complaint(run),
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


def _distance(first: Any, second: Any, axis: int) -> Any:
    return abs(first.mean(axis) - second.mean(axis))
