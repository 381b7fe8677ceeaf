"""The leaderboard: the losses of each contestant at its best settings, and their significance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from merit_lab.arena.contestant import labels
from merit_lab.arena.runs import Runs
from merit_lab.arena.search import Point, Search
from merit_lab.arena.task import TuningTask
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.outcome import Spread
from merit_lab.study.reach import steps_to_reach

if TYPE_CHECKING:
    from merit_lab.arena.plan import Arena


@dataclass(frozen=True)
class Standing:
    """A contestant at its best settings, at one batch size."""

    task: TuningTask
    name: str
    search: Search
    losses: Mapping[int, float]
    """The final validation loss by seed; infinite for a run that diverged."""
    runs: Mapping[int, MeasuredRun]
    tuning: Mapping[Point, float | None]
    """The losses of its tuning runs; infinite for a run that diverged or was abandoned."""
    below: float | None
    """Increase of the loss at half the best learning rate, with the first seed."""
    above: float | None
    """The same at twice the best learning rate."""
    num_diverged: int
    """Number of tuning runs that diverged."""
    num_abandoned: int
    """Number of tuning runs that were abandoned because they were slow."""

    @property
    def mean(self) -> float:
        return self.spread.mean if self.losses else math.inf

    @property
    def spread(self) -> Spread:
        """Of the losses over seeds."""
        return Spread(tuple(self.losses.values()))

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)

    def steps_to(self, target: float) -> float | None:
        """Mean steps over seeds until the loss reaches the target; None if one does not."""
        return _mean([_steps(run, target) for run in self.runs.values()])

    def seconds_to(self, target: float) -> float | None:
        """The same in seconds of training."""
        return _mean([_seconds(run, target) for run in self.runs.values()])

    @property
    def memory_gib(self) -> float | None:
        rows = [row for run in self.runs.values() for row in run.rows.get("train", [])]
        return max((row["memory_gib"] for row in rows if row.get("memory_gib") is not None), default=None)


@dataclass(frozen=True)
class Board:
    """The standings at one batch size, the best first."""

    batch: int
    standings: Sequence[Standing]
    baseline: Standing | None
    """The best one without MERIT's ratios, whose final loss is the target."""
    unranked: Sequence[str] = ()
    """The contestants whose search is not complete."""

    @property
    def best(self) -> Standing:
        return self.standings[0]

    @property
    def target(self) -> float | None:
        """The highest final loss of the baseline's seeds, so that all of them reach it."""
        return max(self.baseline.losses.values()) if self.baseline and self.baseline.is_finite else None

    @cached_property
    def chances(self) -> dict[str, float | None]:
        """The p-value of each standing's difference from the best, by name; None for a single seed."""
        return {other.name: chance(self.best.losses, other.losses) for other in self.standings[1:]}


def chance(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """The p-value of a paired t-test over the seeds that both have; None if these show no spread."""
    from scipy import stats  # type: ignore[import-untyped]

    seeds = sorted(first.keys() & second.keys())
    pairs = [(first[seed], second[seed]) for seed in seeds]
    differences = [x - y for x, y in pairs]
    if len(pairs) < 2 or not all(map(math.isfinite, differences)):
        return None
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return None
    return float(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)


def shared_a_gpu(runs: Iterable[MeasuredRun]) -> bool:
    """Whether runs on a GPU trained at the same time: their seconds then include waiting for one another."""
    on_gpu = [run for run in runs if run.environment.get("device", {}).get("type") == "cuda"]
    spans = sorted(map(_span, on_gpu))
    return any(begin < end for (_, end), (begin, _) in pairwise(spans))


def _span(run: MeasuredRun) -> tuple[datetime, datetime]:
    """When a run trained, without the time to compile and to validate."""
    begin = datetime.fromisoformat(run.environment["started"])
    rows = run.rows.get("train", [])
    return begin, begin + timedelta(seconds=rows[-1]["seconds"] if rows else 0.0)


def boards(arena: Arena, runs: Runs) -> list[Board]:
    """The leaderboards of all batch sizes, with the contestants whose search is complete."""
    searches = arena.searches(runs)
    names = labels(arena.contestants)
    result = []
    for batch in arena.batches:
        standings = [
            _standing(arena, runs, task, names[task.contestant], search)
            for task, search in searches.items()
            if task.batch == batch and not search.missing
        ]
        if standings:
            standings.sort(key=lambda standing: standing.mean)
            plain = [standing for standing in standings if not standing.task.has_merits_ratios]
            unranked = [
                names[task.contestant]
                for task, search in searches.items()
                if task.batch == batch and search.missing
            ]
            result.append(Board(batch, standings, next(iter(plain), None), unranked))
    return result


def _standing(arena: Arena, runs: Runs, task: TuningTask, name: str, search: Search) -> Standing:
    trials = {seed: arena.trial(task, search.best, seed) for seed in arena.seeds}
    tuning = {point: runs.loss(arena.trial(task, point, arena.seeds[0])) for point in search.tried}
    tuned = [runs.of(arena.trial(task, point, arena.seeds[0])) for point in search.tried]
    ended = [run.status for run in tuned if run is not None]
    return Standing(
        task,
        name,
        search,
        {seed: loss for seed, trial in trials.items() if (loss := runs.loss(trial)) is not None},
        {seed: run for seed, trial in trials.items() if (run := runs.of(trial)) is not None},
        tuning,
        _rise(tuning, search.best, 0.5),
        _rise(tuning, search.best, 2.0),
        ended.count("diverged"),
        ended.count("abandoned"),
    )


def _rise(losses: Mapping[Point, float | None], best: Point, factor: float) -> float | None:
    """Increase of the loss at another learning rate, with other settings at which both rates were tried."""
    for point, loss in losses.items():
        shifted = losses.get(point.moved(0, factor))
        if point.values[0] == best.values[0] and loss is not None and shifted is not None:
            return shifted - loss
    return None


def _steps(run: MeasuredRun, target: float) -> float | None:
    return steps_to_reach(target, run.points("validation_loss"))


def _seconds(run: MeasuredRun, target: float) -> float | None:
    """Seconds until a run reached the target, interpolated linearly in steps between two measurements."""
    steps = _steps(run, target)
    times: list[tuple[int, float]] = [(0, 0.0)]
    times += [(row["step"], row["seconds"]) for row in run.rows.get("train", [])]
    if steps is None:
        return None
    for (step, seconds), (later, then) in pairwise(times):
        if later >= steps:
            return seconds + (then - seconds) * (steps - step) / (later - step)
    return times[-1][1]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None
