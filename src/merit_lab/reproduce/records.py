"""Trials and what their runs recorded: the only thing that an analysis sees."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from merit_lab.models import ModelConfig
from merit_lab.record import Run
from merit_lab.report.curves import Curves, Point, finite
from merit_lab.report.gather import MeasuredRun, short_name
from merit_lab.reproduce.corpus import Corpus
from merit_lab.reproduce.scale import Shown
from merit_lab.study.charts import Lines
from merit_lab.study.reach import steps_to_reach
from merit_lab.study.trial import Trial
from merit_lab.train import OptimizerConfig, TrainConfig

BySeed = dict[int, float]


@dataclass(frozen=True)
class Record:
    """A trial, its run directory, and what was recorded there by now; nothing if it was not begun."""

    trial: Shown
    folder: Path
    run: MeasuredRun | None

    @property
    def series(self) -> str:
        return self.trial.series

    @property
    def panel(self) -> str:
        return self.trial.panel

    @property
    def config(self) -> TrainConfig:
        return self.trial.config

    @property
    def status(self) -> str:
        """The run's status; "missing" where there is none."""
        return "missing" if self.run is None else self.run.status

    @cached_property
    def curves(self) -> Curves:
        """What was measured, by name."""
        return {} if self.run is None else self.run.curves

    @property
    def diverged(self) -> bool:
        """Whether it ended because its numbers were none any more."""
        return self.status == "diverged"

    @property
    def has_ended(self) -> bool:
        """Whether it will not go on: it finished or diverged."""
        return self.status in ("finished", "diverged")

    def final_loss(self) -> float | None:
        """The last validation loss of a finished run; infinity for one that diverged, else None."""
        if self.diverged:
            return math.inf
        points = finite(self.curves.get("validation_loss", []))
        return points[-1][1] if self.status == "finished" and points else None

    def largest(self, curve: str) -> float | None:
        """The largest value of a curve over the run, however it ended; None where there is none."""
        points = finite(self.curves.get(curve, []))
        return max(value for _, value in points) if points else None

    def steps_to(self, loss: float) -> float | None:
        """Steps until the validation loss was first at ``loss``; see ``steps_to_reach``.

        Infinity for a run that ended above it, None for one that has not ended.
        """
        steps = steps_to_reach(loss, finite(self.curves.get("validation_loss", [])))
        if steps is not None:
            return steps
        return math.inf if self.has_ended else None


@dataclass(frozen=True)
class Records:
    """Records in the order of their trials."""

    all: tuple[Record, ...]

    @property
    def panels(self) -> list[str]:
        """The panels, in order."""
        return list(dict.fromkeys(own.panel for own in self.all))

    @property
    def series(self) -> list[str]:
        """The series, in order."""
        return list(dict.fromkeys(own.series for own in self.all))

    def where_in_words(self, panel: str) -> str:
        """The panel as the end of a comparison's name; nothing where there is but one."""
        return f", {panel}" if len(self.panels) > 1 else ""

    def where(self, predicate: Callable[[Record], bool]) -> Records:
        """Those that fit."""
        return Records(tuple(own for own in self.all if predicate(own)))

    def of(self, *, panel: str | None = None, series: str | None = None) -> Records:
        """Those of a panel, a series, or both."""
        return self.where(lambda own: panel in (None, own.panel) and series in (None, own.series))

    def by_seed(self, quantity: Callable[[Record], float | None], *, diverged: float | None = None) -> BySeed:
        """A quantity of each record by its seed, where it has one.

        Runs that have not ended are left out: what they have is of their first steps, not of a whole run.
        So is what a run has that diverged, which may count as ``diverged`` therefore: as infinite where it
        is worse than any other, as NaN where nothing can be said.
        """
        values = {
            own.config.seed: diverged if own.diverged and diverged is not None else quantity(own)
            for own in self.all
            if own.has_ended
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def final_losses(self) -> BySeed:
        """The final validation losses by seed; infinity where a run diverged."""
        return self.by_seed(Record.final_loss)

    @property
    def optimizers(self) -> dict[str, str]:
        """By series, its optimizer."""
        return {own.series: own.config.optimizer.name for own in self.all}

    def lines(self, curve: str, *, over_tokens: bool = False) -> Lines:
        """A measured curve of every run that has it, by series; over steps or tokens."""
        return {series: list(self.of(series=series)._curves(curve, over_tokens)) for series in self.series}

    def _curves(self, curve: str, over_tokens: bool) -> Iterator[tuple[str, Sequence[Point], bool]]:
        for own in self.all:
            size = own.config.batch * own.config.model.context if over_tokens else 1
            if points := [(step * size, value) for step, value in finite(own.curves.get(curve, []))]:
                yield own.folder.name, points, own.diverged

    @property
    def trouble(self) -> list[str]:
        """A line for each run that did not finish."""
        return [f"{own.folder.name}: {_describe(own)}" for own in self.all if own.status != "finished"]


def plan(trials: Iterable[Shown], folder: Path, corpus: Corpus) -> list[tuple[Shown, Trial]]:
    """Each trial with its run: its configuration for the data, and a directory named after both.

    So entries that need the same run share it, and a run with another configuration or other data is
    another run.
    """
    planned = []
    for trial in trials:
        config = replace(trial.config, data=corpus.folder).resolve(corpus.vocab_size)
        identity = _identity(config, corpus)
        model, optimizer = config.model, config.optimizer
        words = [
            f"{model.family}-{model.layers}x{model.width}",
            "-without-".join([short_name(optimizer.name), *optimizer.without]),
            *(["overridden"] if optimizer.overrides else []),
            *([f"warmup{optimizer.warmup:g}"] if optimizer.warmup != OptimizerConfig.warmup else []),
            *(["qk-norm"] if isinstance(model, ModelConfig) and model.qk_norm else []),
            f"lr{optimizer.lr:g}",
            f"batch{config.batch}",
            f"seed{config.seed}",
            identity[:8],
        ]
        planned.append((trial, Trial(folder / "-".join(words), config)))
    return planned


def _identity(config: TrainConfig, corpus: Corpus) -> str:
    # Modules of the lab as they were called when the first runs were kept: to move one changes no run.
    name = config.optimizer.name.replace("merit_lab.", "merit_optim.lab.")
    config = replace(config, optimizer=replace(config.optimizer, name=name))
    return hashlib.sha256(f"{config.fingerprint} {corpus.fingerprint}".encode()).hexdigest()


def read(planned: Sequence[tuple[Shown, Trial]]) -> Records:
    """What was recorded by now."""
    return Records(
        tuple(
            Record(
                replace(trial, config=own.config),
                own.folder,
                MeasuredRun.read(Run.open(own.folder)) if own.exists else None,
            )
            for trial, own in planned
        )
    )


def _describe(record: Record) -> str:
    if record.run is None:
        return "not run"
    messages = [row["message"] for row in record.run.rows.get("event", []) if row["what"] == record.status]
    return f"{record.status}: {messages[-1]}" if messages else record.status
