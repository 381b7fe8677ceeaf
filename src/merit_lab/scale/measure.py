"""What the runs of a scaling study came to: steps to the target, by optimizer and batch size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.record import Run, Status
from merit_lab.report.gather import MeasuredRun
from merit_lab.scale.fit import ScalingCurve, fit_curve
from merit_lab.study.reach import steps_to_reach
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class Attempt:
    """One run towards the target; ``steps`` is None where it did not get there."""

    name: str
    seed: int
    status: Status
    steps: float | None
    last_step: int

    @property
    def is_done(self) -> bool:
        """Whether it finished or diverged, or got there already."""
        return self.steps is not None or self.status in ("finished", "diverged")


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
        return tuple(own.steps for own in self.attempts if own.steps is not None)

    @property
    def is_reached(self) -> bool:
        """Whether every seed reached the target."""
        return len(self.steps) == len(self.attempts)

    @property
    def mean(self) -> float:
        """Mean steps over seeds; infinite where one did not reach the target."""
        return statistics.fmean(self.steps) if self.is_reached else math.inf

    @property
    def rank(self) -> tuple[int, float]:
        """Learning rates in order of merit: more seeds that get there, then fewer steps."""
        return -len(self.steps), statistics.fmean(self.steps) if self.steps else 0.0


def read_attempt(folder: Path, target: float) -> tuple[TrainConfig, Attempt]:
    """A run's configuration, and how it fared."""
    run = MeasuredRun.read(Run.open(folder))
    losses = run.curves.get("validation_loss", [])
    steps = steps_to_reach(target, losses)
    if steps == 0:
        raise ValueError(
            f"the target {target:g} is not below the loss before training, {losses[0][1]:.3f} in {folder}; "
            "choose a lower target"
        )
    done = max((step for points in run.curves.values() for step, _ in points), default=0)
    config = TrainConfig.from_dict(dict(run.config))
    return config, Attempt(run.name, run.seed, run.status, steps, done)


def measure(folders: Iterable[Path], target: float) -> list[Measurement]:
    """Every measurement, by optimizer and batch as they come, with all learning rates."""
    groups: dict[tuple[str, int, float], list[Attempt]] = {}
    for folder in folders:
        config, attempt = read_attempt(folder, target)
        assert config.optimizer.lr is not None
        groups.setdefault((config.optimizer.name, config.batch, config.optimizer.lr), []).append(attempt)
    return [Measurement(*key, tuple(attempts)) for key, attempts in groups.items()]


def unfinished(measurements: Iterable[Measurement]) -> list[str]:
    """The names of the runs that have not come to their end."""
    return [own.name for one in measurements for own in one.attempts if not own.is_done]


def choose(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Of each optimizer and batch the measurement with the best learning rate, batches rising."""
    groups: dict[tuple[str, int], list[Measurement]] = {}
    for own in measurements:
        groups.setdefault((own.optimizer, own.batch), []).append(own)
    best = [min(group, key=lambda own: own.rank) for group in groups.values()]
    order = list(dict.fromkeys(own.optimizer for own in measurements))
    return sorted(best, key=lambda own: (order.index(own.optimizer), own.batch))


def fit(chosen: Sequence[Measurement], optimizer: str) -> ScalingCurve | None:
    """The curve through an optimizer's runs, at the batches where every seed reached the target."""
    runs = [
        (float(own.batch), steps)
        for own in chosen
        if own.optimizer == optimizer and own.is_reached
        for steps in own.steps
    ]
    return fit_curve([batch for batch, _ in runs], [steps for _, steps in runs]) if runs else None
