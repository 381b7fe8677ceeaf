"""The trials of an arena: tune every contestant with the same budget, then train it with several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from merit_lab.arena.contestant import Contestant
from merit_lab.arena.page import make_page
from merit_lab.arena.runs import Runs, bars_of
from merit_lab.arena.search import Point, Search, rounded, search
from merit_lab.arena.task import MOMENTUM, TuningTask
from merit_lab.data import Dataset
from merit_lab.models import num_parameters
from merit_lab.runs import Run
from merit_lab.study import Round
from merit_lab.study.fields import LR, short, with_values
from merit_lab.study.page import Page
from merit_lab.study.trial import Trial, check_distinct, check_same
from merit_lab.train import TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER

_VALIDATIONS = 25  # at least, per run: steps to a loss are interpolated between them
_RULE = "the runs of an arena differ in their optimizer, batch, tuned settings and seed only"


@dataclass(frozen=True, kw_only=True)
class Arena:
    """A ranking of optimizers that are tuned with the same budget.

    Args:
        base: configuration that all runs share. All batch sizes train on the same number of tokens, by
            default five per parameter.
        folder: folder of the run directories.
        contestants: the contestants, with starts of their searches for the batch of ``base``.
        batches: batch sizes in sequences, in ascending order.
        budget: tuning runs of each contestant, with the first seed.
        seeds: the seeds with which the best settings are trained.
    """

    base: TrainConfig
    folder: Path
    contestants: Sequence[Contestant]
    batches: Sequence[int]
    budget: int
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        check_distinct("optimizers", [contestant.text for contestant in self.contestants])
        check_distinct("seeds", self.seeds)
        check_distinct("batches", self.batches)
        if self.budget < 3:
            raise ValueError(
                f"--budget is {self.budget}; a contestant needs at least 3 runs, to compare a learning rate "
                "with its two neighbours"
            )
        if self.base.measure.validation_every == 0:
            raise ValueError(
                "measure.validation_every is 0; an arena compares validation losses, so it must be at least 1"
            )

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset.open(self.base.data)

    @cached_property
    def tokens(self) -> int:
        """The length of every run; by default a quarter of compute-optimal, because there are many runs."""
        model = self.base.resolve(self.dataset.vocab_size).model
        per_step = self.base.batch * model.context
        if self.base.steps is not None:
            return self.base.steps * per_step
        return self.base.tokens or TOKENS_PER_PARAMETER // 4 * num_parameters(model)

    @cached_property
    def tasks(self) -> list[TuningTask]:
        """All contestants at all batch sizes, batch by batch."""
        return [
            TuningTask(contestant, contestant.over(self.base.optimizer), batch)
            for batch in self.batches
            for contestant in self.contestants
        ]

    def _check(self, states: Mapping[TuningTask, Search]) -> None:
        """Raise if an existing run differs from the trial of the same name."""
        for task, state in states.items():
            used = [self.trial(task, point, self.seeds[0]) for point in state.tried]
            if not state.missing:
                used += [self.trial(task, state.best, seed) for seed in self.seeds[1:]]
            for trial in used:
                if trial.exists:
                    check_same(Run.open(trial.folder), trial.config, self.dataset, _RULE)

    def next(self) -> Round | None:
        """The trials that the searches need and, for complete searches, the best settings with all seeds."""
        runs = Runs.read(self.folder)
        states = self.searches(runs)
        self._check(states)  # in every round: which runs are used depends on those before
        missing: list[Trial] = []
        for task, state in states.items():
            if state.missing:
                tried = [self.trial(task, point, self.seeds[0]) for point in state.tried]
                bars = bars_of([run for trial in tried if (run := runs.of(trial)) is not None])
                needed = [
                    replace(self.trial(task, point, self.seeds[0]), bars=bars) for point in state.missing
                ]
            else:
                needed = [self.trial(task, state.best, seed) for seed in self.seeds]
            missing += [trial for trial in needed if runs.loss(trial) is None]
        return Round(missing, later=self._later(states)) if missing else None

    def findings(self) -> Page:
        """The page, read from the run directories."""
        return make_page(self)

    def _later(self, states: Mapping[TuningTask, Search]) -> list[Trial]:
        """As many trials as may follow: what is left of each budget, and the other seeds."""
        later: list[Trial] = []
        for task in self.tasks:
            state = states.get(task)  # None if it has to wait
            if state is None or state.missing:
                num_tried = 0 if state is None else len(state.tried)
                any_of_them = self.trial(task, self._start(task, None), self.seeds[0])
                later += [any_of_them] * (self.budget - num_tried + len(self.seeds) - 1)
        return later

    def searches(self, runs: Runs) -> dict[TuningTask, Search]:
        """The state of each search. A larger batch starts at the best settings of the next smaller one."""
        states: dict[TuningTask, Search] = {}
        for task in self.tasks:
            place = list(self.batches).index(task.batch)
            smaller = states.get(replace(task, batch=self.batches[place - 1])) if place else None
            if place and (smaller is None or smaller.missing):
                continue  # it has to wait
            states[task] = search(
                self._start(task, smaller),
                task.axes,
                lambda point, task=task: runs.loss(self.trial(task, point, self.seeds[0])),  # type: ignore[misc]
                self.budget,
            )
        return states

    def _start(self, task: TuningTask, smaller: Search | None) -> Point:
        values = task.start(self.base)
        values[LR] *= math.sqrt(task.batch / self.base.batch)
        if smaller is not None:
            values = dict(zip((axis.field for axis in task.axes), smaller.best.values, strict=True))
        return Point(tuple(rounded(values[axis.field]) for axis in task.axes))

    @cached_property
    def _trials(self) -> dict[tuple[TuningTask, Point, int], Trial]:
        """The trials made so far: a search asks for the same ones again and again."""
        return {}

    def trial(self, task: TuningTask, point: Point, seed: int) -> Trial:
        """The trial of a task at a point."""
        key = task, point, seed
        if key not in self._trials:
            self._trials[key] = self._make_trial(*key)
        return self._trials[key]

    def _make_trial(self, task: TuningTask, point: Point, seed: int) -> Trial:
        values = task.settings(point)
        # Without the default momentum, the names are those of runs from before momenta were tuned.
        named = {
            key: value for key, value in values.items() if (key, value) != (MOMENTUM, task.default_momentum)
        }
        settings = [f"{short(field).replace('_', '-')}{value:g}" for field, value in named.items()]
        base = replace(
            self.base, optimizer=task.optimizer, batch=task.batch, seed=seed, steps=None, tokens=self.tokens
        )
        config = with_values(base, values).resolve(self.dataset.vocab_size)
        assert config.steps is not None and config.measure.validation_every is not None
        most, given = math.ceil(config.steps / _VALIDATIONS), self.base.measure.validation_every
        if given is not None and given > most:
            raise ValueError(
                f"measure.validation_every is {given}, but an arena validates a run at least {_VALIDATIONS} "
                f"times, which is every {most} of {config.steps} steps with a batch of {task.batch}; give at "
                f"most {most}, or leave it out"
            )
        every = min(config.measure.validation_every, most)
        config = with_values(config, {"measure.validation_every": every})
        contestant = task.contestant.text.replace(":", ".").replace("/", "_")
        name = "-".join([contestant, f"batch{task.batch}", *settings, f"seed{seed}"])
        return Trial(self.folder / name, config)
