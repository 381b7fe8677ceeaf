"""The trials of an arena: tune every contestant with the same budget, then train it with several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from merit_lab.arena.contestant import Contestant, usual_rate
from merit_lab.arena.search import Point, Search, SearchAxis, rounded, search
from merit_lab.data import Dataset
from merit_lab.models import num_parameters
from merit_lab.record import OVER, Run, run_folders
from merit_lab.report.gather import MeasuredRun, short_name
from merit_lab.study.fields import LR, short, with_values
from merit_lab.study.study import Round
from merit_lab.study.trial import Trial, check_distinct, check_same
from merit_lab.train import Bar, OptimizerConfig, TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER
from merit_lab.train.optimizer_names import class_of
from merit_lab.train.optimizer_options import default_of, takes
from merit_optim.optim.hidden import HiddenMatrixOptimizer

# The learning rate of the rest, in a second optimizer or as an option of the first. Tuned as a share of the
# learning rate, so that both change together.
_REST, _REST_OPTION = "optimizer.rest_lr", "optimizer.options.rest_lr"
WARMUP, DECAY = "optimizer.warmup", "optimizer.weight_decay"
# Tuned as its distance from 1: that doubles from 0.95 to 0.9 and from 0.9 to 0.8.
MOMENTUM = "optimizer.options.momentum"
_LEAST_DISTANCE = 1e-4  # much nearer to 1, a momentum of six digits would be 1
_CHECKS = (1 / 3, 1 / 2, 2 / 3)  # shares of a tuning run after which it may be abandoned
_VALIDATIONS = 25  # at least, per run: steps to a loss are interpolated between them
_RULE = "the runs of an arena differ in their optimizer, batch, tuned settings and seed only"


@dataclass(frozen=True)
class TuningTask:
    """A contestant to be tuned at one batch size.

    ``optimizer`` has the settings that are not tuned.
    """

    contestant: Contestant
    optimizer: OptimizerConfig
    batch: int

    @cached_property
    def axes(self) -> list[SearchAxis]:
        """The settings to tune, the learning rate first."""
        rest = [SearchAxis(self.rest_field, 2.0)] if self.rest_field is not None else []
        decay = (
            [SearchAxis(DECAY, 4.0)]
            if any(takes(class_of(name), "weight_decay") for name in self.names)
            else []
        )
        momentum = (
            [SearchAxis(MOMENTUM, 2.0, least=_LEAST_DISTANCE, most=1.0)]
            if self.default_momentum is not None
            else []
        )
        return [SearchAxis(LR, 2.0), *rest, SearchAxis(WARMUP, 2.0, most=0.5), *momentum, *decay]

    @property
    def names(self) -> list[str]:
        """The names of its optimizer and, if there is one, of the second."""
        return [name for name in (self.optimizer.name, self.optimizer.rest) if name is not None]

    @property
    def has_merits_ratios(self) -> bool:
        """Whether one of its optimizers uses MERIT's ratios."""
        return any("merit" in short_name(name).lower() for name in self.names)

    @property
    def rest_field(self) -> str | None:
        """The field with the learning rate of the rest, if it has a separate one."""
        if self.optimizer.rest is not None:
            return _REST
        return None if _rest_share(self.optimizer.name) is None else _REST_OPTION

    @cached_property
    def default_momentum(self) -> float | None:
        """The momentum at which its search starts; None if its optimizer has none, or if it is given."""
        if short(MOMENTUM) in self.optimizer.options_by_name():
            return None
        default = default_of(self.optimizer.name, short(MOMENTUM))
        return default if isinstance(default, int | float) and 0 <= default < 1 else None

    def settings(self, point: Point) -> dict[str, float]:
        """The settings at a point, by dotted name."""
        values = dict(zip((axis.field for axis in self.axes), point.values, strict=True))
        if (rest := self.rest_field) is not None:
            values[rest] = rounded(values[rest] * values[LR])
        if MOMENTUM in values:
            values[MOMENTUM] = rounded(1 - values[MOMENTUM])
        return values

    def start(self, base: TrainConfig) -> dict[str, float]:
        """The starts of its searches, for the batch of ``base``."""
        lr = self.contestant.begin("lr") or usual_rate(base, self.optimizer.name)
        begins = {LR: lr, WARMUP: base.optimizer.warmup, DECAY: base.optimizer.weight_decay}
        begins |= {f"optimizer.{key}": value for key, value in self.contestant.begins if key != "rest_lr"}
        if self.default_momentum is not None:
            begins[MOMENTUM] = 1 - self.default_momentum
        rest_lr = self.contestant.begin("rest_lr") or self.optimizer.options_by_name().get("rest_lr")
        if self.optimizer.rest is not None:
            rest_lr = rest_lr or self.optimizer.rest_lr
            begins[_REST] = (rest_lr or usual_rate(base, self.optimizer.rest)) / begins[LR]
        elif (share := _rest_share(self.optimizer.name)) is not None:
            begins[_REST_OPTION] = share if rest_lr is None else rest_lr / begins[LR]
        elif rest_lr is not None:
            raise ValueError(
                f"{self.contestant.text} has only one learning rate, but rest_lr={rest_lr:g} sets a "
                f"second; add a second optimizer, as in {self.contestant.text},rest=adamw"
            )
        return begins


def _rest_share(optimizer: str) -> float | None:
    """The default rate of the rest as a share, for an optimizer that handles all kinds of weights itself."""
    kind = class_of(optimizer)
    if isinstance(kind, type) and issubclass(kind, HiddenMatrixOptimizer):
        return kind.REST_SHARE
    return None


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
        runs = Runs.read(self)
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


@dataclass(frozen=True)
class Runs:
    """The existing runs of an arena, by the names of their directories."""

    by_name: Mapping[str, MeasuredRun]

    @classmethod
    def read(cls, arena: Arena) -> Runs:
        """Read the existing runs."""
        return cls({folder.name: MeasuredRun.read(Run.open(folder)) for folder in run_folders(arena.folder)})

    def of(self, trial: Trial) -> MeasuredRun | None:
        return self.by_name.get(trial.folder.name)

    def loss(self, trial: Trial) -> float | None:
        """The final validation loss; None for a run that is not done.

        It is infinite for a run that diverged or was abandoned: neither can be the best.
        """
        run = self.of(trial)
        if run is None or run.status not in OVER:
            return None
        losses = run.curves.get("validation_loss", [])
        return losses[-1][1] if run.status == "finished" and losses else math.inf


def bars_of(runs: Sequence[MeasuredRun]) -> tuple[Bar, ...]:
    """The losses above which a tuning run is abandoned: it needs over twice the steps of the best run.

    After a third, a half and two thirds of the steps, its loss must be below that of the best finished run at
    half as many steps. A rate that is far too high or too low fails this. A rate that is a little too high,
    which starts slowly and ends low, passes.
    """
    finished = [run for run in runs if run.status == "finished" and run.points("validation_loss")]
    if not finished:
        return ()
    losses = min((run.points("validation_loss") for run in finished), key=lambda curve: curve[-1][1])
    last = losses[-1][0]
    steps = {step for share in _CHECKS if (step := _first(losses, share * last)) is not None}
    return tuple(Bar(step, _at(losses, step / 2)) for step in sorted(steps) if step < last)


def _first(losses: Sequence[tuple[int, float]], step: float) -> int | None:
    """The step of the first validation at or after a step."""
    return next((validated for validated, _ in losses if validated >= step), None)


def _at(losses: Sequence[tuple[int, float]], step: float) -> float:
    """The loss at a step, interpolated linearly between validations."""
    for (before, higher), (after, lower) in pairwise(losses):
        if before <= step <= after:
            return higher + (lower - higher) * (step - before) / (after - before)
    return losses[-1][1]
