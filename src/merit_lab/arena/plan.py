"""The trials of an arena: every contestant is tuned with the same budget, then trained with several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from merit_lab.arena.entry import Entry, usual_rate
from merit_lab.arena.search import Axis, Point, Search, search
from merit_lab.data import Dataset
from merit_lab.models import num_parameters
from merit_lab.record import Run, run_folders
from merit_lab.report.curves import finite
from merit_lab.report.gather import MeasuredRun, short_name
from merit_lab.study.fields import LR, short, with_values
from merit_lab.study.study import Round
from merit_lab.study.trial import Trial, check_distinct, check_same
from merit_lab.train import Bar, OptimizerConfig, TrainConfig
from merit_lab.train.config import TOKENS_PER_PARAMETER
from merit_lab.train.options import takes
from merit_lab.train.own_optimizer import class_of
from merit_optim.optim.hidden import HiddenMatrixOptimizer

# The rate of a second optimizer, and of what is no hidden matrix in one that has both. As a share of the
# learning rate, so that both move together.
_REST, _OWN_REST = "optimizer.rest_lr", "optimizer.options.rest_lr"
WARMUP, DECAY = "optimizer.warmup", "optimizer.weight_decay"
_LOOKS = (1 / 3, 1 / 2, 2 / 3)
_VALIDATIONS = 25  # of a run at least: steps to a loss are read from them
_RULE = "the runs of an arena differ in their optimizer, batch, tuned settings and seed alone"


@dataclass(frozen=True)
class Contestant:
    """An entry with one batch size, and what is tuned of it: the learning rate first.

    ``optimizer`` are its settings where they are not tuned.
    """

    entry: Entry
    optimizer: OptimizerConfig
    batch: int

    @cached_property
    def axes(self) -> list[Axis]:
        rest = [Axis(self.rest_field, 2.0)] if self.rest_field is not None else []
        decay = (
            [Axis(DECAY, 4.0)] if any(takes(class_of(name), "weight_decay") for name in self.names) else []
        )
        return [Axis(LR, 2.0), *rest, Axis(WARMUP, 2.0, most=0.5), *decay]

    @property
    def names(self) -> list[str]:
        """Its optimizer and, where there is one, the second."""
        return [name for name in (self.optimizer.name, self.optimizer.rest) if name is not None]

    @property
    def has_ratios(self) -> bool:
        """Whether it is one of MERIT's family."""
        return any("merit" in short_name(name).lower() for name in self.names)

    @property
    def rest_field(self) -> str | None:
        """The learning rate of embeddings, head and vectors, where it is another."""
        if self.optimizer.rest is not None:
            return _REST
        return None if _own_rest_share(self.optimizer.name) is None else _OWN_REST

    def settings(self, point: Point) -> dict[str, float]:
        """What a point means: values by dotted name."""
        values = dict(zip((axis.field for axis in self.axes), point.values, strict=True))
        if (rest := self.rest_field) is not None:
            values[rest] = float(f"{values[rest] * values[LR]:.6g}")
        return values

    def start(self, base: TrainConfig) -> dict[str, float]:
        """Where its searches begin, for the batch of ``base``."""
        lr = self.entry.begin("lr") or usual_rate(base, self.optimizer.name)
        begins = {LR: lr, WARMUP: base.optimizer.warmup, DECAY: base.optimizer.weight_decay}
        begins |= {f"optimizer.{key}": value for key, value in self.entry.begins if key != "rest_lr"}
        rest_lr = self.entry.begin("rest_lr")
        if self.optimizer.rest is not None:
            given = rest_lr or self.optimizer.rest_lr
            begins[_REST] = (given or usual_rate(base, self.optimizer.rest)) / begins[LR]
        elif (share := _own_rest_share(self.optimizer.name)) is not None:
            begins[_OWN_REST] = share if rest_lr is None else rest_lr / begins[LR]
        elif rest_lr is not None:
            raise ValueError(
                f"{self.entry.text} has one learning rate, and rest_lr={rest_lr:g} is for a second; add a "
                f"second optimizer, as in {self.entry.text},rest=adamw"
            )
        return begins


def _own_rest_share(optimizer: str) -> float | None:
    """The rate of what is no hidden matrix by default, of an optimizer that sorts weights itself."""
    kind = class_of(optimizer)
    if isinstance(kind, type) and issubclass(kind, HiddenMatrixOptimizer):
        return kind.REST_SHARE
    return None


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Which optimizer is best, if all are tuned alike.

    Args:
        base: what all runs share. Its length in tokens is that of all batch sizes; None: five a parameter.
        folder: its runs are folders in here.
        entries: who takes part, and where their searches begin for the batch of ``base``.
        batches: sizes in sequences, rising.
        budget: tuning runs of each contestant, with the first seed.
        seeds: with which the best setting of each is trained.
    """

    base: TrainConfig
    folder: Path
    entries: Sequence[Entry]
    batches: Sequence[int]
    budget: int
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        check_distinct("optimizers", [own.text for own in self.entries])
        check_distinct("seeds", self.seeds)
        check_distinct("batches", self.batches)
        if self.budget < 3:
            raise ValueError(
                f"--budget is {self.budget}; a learning rate is judged between its neighbours, so a "
                "contestant needs at least 3 runs"
            )
        if self.base.measure.validation_every == 0:
            raise ValueError("measure.validation_every is 0; an arena is decided by the validation loss")

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset.open(self.base.data)

    @cached_property
    def tokens(self) -> int:
        """The length of every run; a quarter of compute-optimal where none is given, for there are many."""
        model = self.base.resolve(self.dataset.vocab_size).model
        per_step = self.base.batch * model.context
        if self.base.steps is not None:
            return self.base.steps * per_step
        return self.base.tokens or TOKENS_PER_PARAMETER // 4 * num_parameters(model)

    @cached_property
    def contestants(self) -> list[Contestant]:
        """Batch by batch."""
        return [
            Contestant(own, own.over(self.base.optimizer), batch)
            for batch in self.batches
            for own in self.entries
        ]

    def check(self) -> None:
        """Raise where a run of an earlier call, of the same name, is another than it would be now."""
        runs = Runs.read(self)
        for own, found in self.searches(runs).items():
            for trial in (self.trial(own, point, self.seeds[0]) for point in found.tried):
                if trial.exists:
                    check_same(Run.open(trial.folder), trial.config, self.dataset, _RULE)

    def next(self) -> Round | None:
        """What the searches ask for and, where one is over, its best setting with the other seeds."""
        runs = Runs.read(self)
        missing: list[Trial] = []
        for own, found in self.searches(runs).items():
            if found.asked:
                tried = [self.trial(own, point, self.seeds[0]) for point in found.tried]
                bars = bars_of([run for trial in tried if (run := runs.of(trial)) is not None])
                asked = [replace(self.trial(own, point, self.seeds[0]), bars=bars) for point in found.asked]
            else:
                asked = [self.trial(own, found.best, seed) for seed in self.seeds]
            missing += [trial for trial in asked if runs.loss(trial) is None]
        most = len(self.contestants) * (self.budget + len(self.seeds) - 1)
        later = max(0, most - len(runs.by_name) - len(missing))
        return Round(missing, later=later) if missing else None

    def searches(self, runs: Runs) -> dict[Contestant, Search]:
        """How far each contestant is tuned. A larger batch begins at what was best with the smaller one."""
        found: dict[Contestant, Search] = {}
        for own in self.contestants:
            place = list(self.batches).index(own.batch)
            smaller = found.get(replace(own, batch=self.batches[place - 1])) if place else None
            if place and (smaller is None or smaller.asked):
                continue  # it has to wait
            found[own] = search(
                self._start(own, smaller),
                own.axes,
                lambda point, own=own: runs.loss(self.trial(own, point, self.seeds[0])),  # type: ignore[misc]
                self.budget,
            )
        return found

    def _start(self, own: Contestant, smaller: Search | None) -> Point:
        values = own.start(self.base)
        values[LR] *= math.sqrt(own.batch / self.base.batch)
        if smaller is not None:
            values = dict(zip((axis.field for axis in own.axes), smaller.best.values, strict=True))
        return Point(tuple(float(f"{values[axis.field]:.6g}") for axis in own.axes))

    @cached_property
    def _trials(self) -> dict[tuple[Contestant, Point, int], Trial]:
        """Those made so far: a search asks for the same ones again and again."""
        return {}

    def trial(self, own: Contestant, point: Point, seed: int) -> Trial:
        """A contestant's run at a point."""
        key = own, point, seed
        if key not in self._trials:
            self._trials[key] = self._make_trial(*key)
        return self._trials[key]

    def _make_trial(self, own: Contestant, point: Point, seed: int) -> Trial:
        values = own.settings(point)
        words = [f"{short(field).replace('_', '-')}{value:g}" for field, value in values.items()]
        base = replace(
            self.base, optimizer=own.optimizer, batch=own.batch, seed=seed, steps=None, tokens=self.tokens
        )
        config = with_values(base, values).resolve(self.dataset.vocab_size)
        assert config.steps is not None and config.measure.validation_every is not None
        every = min(config.measure.validation_every, math.ceil(config.steps / _VALIDATIONS))
        config = with_values(config, {"measure.validation_every": every})
        contestant = own.entry.text.replace(":", ".").replace("/", "_")
        name = "-".join([contestant, f"batch{own.batch}", *words, f"seed{seed}"])
        return Trial(self.folder / name, config)


@dataclass(frozen=True)
class Runs:
    """The runs of an arena as they are now, by the names of their directories."""

    by_name: Mapping[str, MeasuredRun]

    @classmethod
    def read(cls, arena: Arena) -> Runs:
        """Read those that are there."""
        return cls({folder.name: MeasuredRun.read(Run.open(folder)) for folder in run_folders(arena.folder)})

    def of(self, trial: Trial) -> MeasuredRun | None:
        return self.by_name.get(trial.folder.name)

    def loss(self, trial: Trial) -> float | None:
        """The validation loss at the end; None for a run that has not ended.

        It is infinite for one that diverged or was given up: either way it is not the best.
        """
        run = self.of(trial)
        if run is None or run.status not in ("finished", "diverged", "abandoned"):
            return None
        losses = run.curves.get("validation_loss", [])
        return losses[-1][1] if run.status == "finished" and losses else math.inf


def bars_of(runs: Sequence[MeasuredRun]) -> tuple[Bar, ...]:
    """Where a tuning run is given up: if it needs more than twice the steps of the best one so far.

    After a third, a half and two thirds of the steps its loss must be below what the best finished run had at
    half as many. A rate that is too high or too low by factors fails this; one that begins slowly and ends
    low, as a rate does that is a little too high, passes it.
    """
    finished = [run for run in runs if run.status == "finished" and run.curves.get("validation_loss")]
    if not finished:
        return ()
    losses = min((finite(run.curves["validation_loss"]) for run in finished), key=lambda curve: curve[-1][1])
    last = losses[-1][0]
    looks = {step for share in _LOOKS if (step := _first(losses, share * last)) is not None}
    return tuple(Bar(step, _at(losses, step / 2)) for step in sorted(looks) if step < last)


def _first(losses: Sequence[tuple[int, float]], step: float) -> int | None:
    """The first validation from a step on."""
    return next((own for own, _ in losses if own >= step), None)


def _at(losses: Sequence[tuple[int, float]], step: float) -> float:
    """The loss at a step, on straight lines between validations."""
    for (before, higher), (after, lower) in pairwise(losses):
        if before <= step <= after:
            return higher + (lower - higher) * (step - before) / (after - before)
    return losses[-1][1]
