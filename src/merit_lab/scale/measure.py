"""The measurements of a scaling study: steps to the target by optimizer and batch size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.results.gather import MeasuredRun
from merit_lab.runs import OVER, Run, Status
from merit_lab.scale.fit import ScalingCurve, fit_curve
from merit_lab.study.reach import steps_to_reach
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class Attempt:
    """One run; ``steps`` is None if it did not reach the target."""

    name: str
    seed: int
    status: Status
    steps: float | None
    last_step: int

    @property
    def is_done(self) -> bool:
        """Whether it is over, or has reached the target."""
        return self.steps is not None or self.status in OVER


@dataclass(frozen=True)
class Measurement:
    """All seeds of an optimizer with one batch size and learning rate."""

    optimizer: str
    batch: int
    lr: float
    attempts: tuple[Attempt, ...]

    @property
    def steps(self) -> tuple[float, ...]:
        """The steps of the seeds that reached the target."""
        return tuple(attempt.steps for attempt in self.attempts if attempt.steps is not None)

    @property
    def is_reached(self) -> bool:
        """Whether every seed reached the target."""
        return len(self.steps) == len(self.attempts)

    @property
    def mean(self) -> float:
        """Mean steps over seeds; infinite if one did not reach the target."""
        return statistics.fmean(self.steps) if self.is_reached else math.inf

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key of learning rates, the best first: more seeds that reach the target, then fewer steps."""
        return -len(self.steps), statistics.fmean(self.steps) if self.steps else 0.0


def read_attempt(folder: Path, target: float) -> tuple[TrainConfig, Attempt]:
    """Return a run's configuration and its attempt."""
    run = MeasuredRun.read(Run.open(folder))
    losses = run.curves.get("validation_loss", [])
    steps = steps_to_reach(target, losses)
    if steps == 0:
        raise ValueError(
            f"the target {target:g} is not below the initial loss, {losses[0][1]:.3f} in {folder}; "
            "choose a lower target"
        )
    done = max((step for points in run.curves.values() for step, _ in points), default=0)
    config = TrainConfig.from_dict(dict(run.config))
    return config, Attempt(run.name, run.seed, run.status, steps, done)


def measure(folders: Iterable[Path], target: float) -> list[Measurement]:
    """Read all measurements, one for each optimizer, batch and learning rate."""
    groups: dict[tuple[str, int, float], list[Attempt]] = {}
    for folder in folders:
        config, attempt = read_attempt(folder, target)
        assert config.optimizer.lr is not None
        groups.setdefault((config.optimizer.name, config.batch, config.optimizer.lr), []).append(attempt)
    return [Measurement(*key, tuple(attempts)) for key, attempts in groups.items()]


def unfinished(measurements: Iterable[Measurement]) -> list[str]:
    """The names of the runs that are not done."""
    return [attempt.name for one in measurements for attempt in one.attempts if not attempt.is_done]


def choose(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurement with the best learning rate for each optimizer and batch, in order of batch size."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.optimizer, measurement.batch), []).append(measurement)
    best = [min(group, key=lambda measurement: measurement.rank) for group in groups.values()]
    order = list(dict.fromkeys(measurement.optimizer for measurement in measurements))
    return sorted(best, key=lambda measurement: (order.index(measurement.optimizer), measurement.batch))


def fit(chosen: Sequence[Measurement], optimizer: str) -> ScalingCurve | None:
    """Fit the curve of an optimizer to the batch sizes at which every seed reached the target."""
    runs = [
        (float(measurement.batch), steps)
        for measurement in chosen
        if measurement.optimizer == optimizer and measurement.is_reached
        for steps in measurement.steps
    ]
    return fit_curve([batch for batch, _ in runs], [steps for _, steps in runs]) if runs else None
