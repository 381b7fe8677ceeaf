"""The leaderboard: what each contestant came to at its best setting, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from merit_lab.arena.entry import labels
from merit_lab.arena.plan import Arena, Contestant, Runs
from merit_lab.arena.search import Point, Search
from merit_lab.report.curves import finite
from merit_lab.report.gather import MeasuredRun
from merit_lab.study.reach import steps_to_reach


@dataclass(frozen=True)
class Standing:
    """A contestant at its best setting."""

    contestant: Contestant
    name: str
    search: Search
    losses: Mapping[int, float]
    """The validation loss at the end, by seed; infinite for a run that diverged."""
    runs: Mapping[int, MeasuredRun]
    tuning: Mapping[Point, float | None]
    """The losses of its tuning runs, infinite for one that diverged or was given up."""
    below: float | None
    """How much higher the loss is at half of the best learning rate, with the first seed."""
    above: float | None
    """The same at twice of it."""
    num_diverged: int
    """Of its tuning runs."""
    num_abandoned: int
    """Of its tuning runs, given up because they were slow."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values()) if self.losses else math.inf

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.losses.values()) if len(self.losses) > 1 and self.is_finite else None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)

    def steps_to(self, target: float) -> float | None:
        """Steps until the loss is at the target, the mean over seeds; None where one does not get there."""
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
    """The standings with one batch size, the best first."""

    batch: int
    standings: Sequence[Standing]
    baseline: Standing | None
    """The best one without MERIT's ratios, whose final loss is the target of the others."""

    @property
    def best(self) -> Standing:
        return self.standings[0]

    @property
    def target(self) -> float | None:
        """The highest loss that a seed of the baseline ends with, so that all of them get there."""
        return max(self.baseline.losses.values()) if self.baseline and self.baseline.is_finite else None

    @cached_property
    def chances(self) -> dict[str, float | None]:
        """How likely a difference like that to the best one is by chance, by name; None for a single seed."""
        return {own.name: chance(self.best.losses, own.losses) for own in self.standings[1:]}


def chance(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """The p-value of a paired t-test over the seeds that both have; None where these tell of no spread."""
    from scipy import stats  # type: ignore[import-untyped]

    seeds = sorted(first.keys() & second.keys())
    pairs = [(first[seed], second[seed]) for seed in seeds]
    differences = [x - y for x, y in pairs]
    if len(pairs) < 2 or not all(map(math.isfinite, differences)):
        return None
    if math.isclose(min(differences), max(differences), rel_tol=1e-9):
        return None
    return float(stats.ttest_rel(*zip(*pairs, strict=True)).pvalue)


def boards(arena: Arena, runs: Runs) -> list[Board]:
    """The leaderboard of every batch size for which all contestants are tuned."""
    searches = arena.searches(runs)
    names = labels(arena.entries)
    found = []
    for batch in arena.batches:
        standings = [
            _standing(arena, runs, own, names[own.entry], search)
            for own, search in searches.items()
            if own.batch == batch and not search.asked
        ]
        if standings:
            standings.sort(key=lambda own: own.mean)
            plain = [own for own in standings if not own.contestant.has_ratios]
            found.append(Board(batch, standings, next(iter(plain), None)))
    return found


def _standing(arena: Arena, runs: Runs, own: Contestant, name: str, search: Search) -> Standing:
    trials = {seed: arena.trial(own, search.best, seed) for seed in arena.seeds}
    tuning = {point: runs.loss(arena.trial(own, point, arena.seeds[0])) for point in search.tried}
    tuned = [runs.of(arena.trial(own, point, arena.seeds[0])) for point in search.tried]
    ended = [run.status for run in tuned if run is not None]
    return Standing(
        own,
        name,
        search,
        {seed: loss for seed, one in trials.items() if (loss := runs.loss(one)) is not None},
        {seed: run for seed, one in trials.items() if (run := runs.of(one)) is not None},
        tuning,
        _rise(tuning, search.best, 0.5),
        _rise(tuning, search.best, 2.0),
        ended.count("diverged"),
        ended.count("abandoned"),
    )


def _rise(losses: Mapping[Point, float | None], best: Point, factor: float) -> float | None:
    """What another learning rate costs, at whatever values of the other settings both were tried."""
    for point, loss in losses.items():
        beside = losses.get(point.moved(0, factor))
        if point.values[0] == best.values[0] and loss is not None and beside is not None:
            return beside - loss
    return None


def _steps(run: MeasuredRun, target: float) -> float | None:
    return steps_to_reach(target, finite(run.curves.get("validation_loss", [])))


def _seconds(run: MeasuredRun, target: float) -> float | None:
    """When a run came to the target: between two measurements of time as far along as in steps."""
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
