"""Trials and the records of their runs, the only input of an analysis."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from merit_lab.models import ModelConfig
from merit_lab.paper.corpus import CorpusIdentity
from merit_lab.paper.setups import EntryTrial
from merit_lab.results.curves import Point
from merit_lab.results.gather import MeasuredRun, short_name
from merit_lab.results.outcome import Spread
from merit_lab.runs import Run
from merit_lab.study.charts import Line, Lines
from merit_lab.study.reach import steps_to_reach
from merit_lab.study.trial import Trial
from merit_lab.tables import NOTHING
from merit_lab.train import OptimizerConfig, TrainConfig

BySeed = dict[int, float]


@dataclass(frozen=True)
class TrialRecord:
    """A trial, its run directory, and what its run has recorded so far; None if it has not started."""

    trial: EntryTrial
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
        """The run's status; "missing" if there is no run."""
        return "missing" if self.run is None else self.run.status

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch * self.config.model.context

    def points(self, curve: str) -> list[Point]:
        """The finite points of a curve; empty if it was not measured."""
        return [] if self.run is None else self.run.points(curve)

    @property
    def diverged(self) -> bool:
        """Whether it ended because its numbers were no longer finite."""
        return self.status == "diverged"

    @property
    def has_ended(self) -> bool:
        """Whether it finished or diverged, and so will not continue."""
        return self.status in ("finished", "diverged")

    def final_loss(self) -> float | None:
        """The last validation loss of a finished run; infinity if it diverged, None if it has not ended."""
        if self.diverged:
            return math.inf
        points = self.points("validation_loss")
        return points[-1][1] if self.status == "finished" and points else None

    def largest(self, curve: str) -> float | None:
        """The largest finite value of a curve, however the run ended; None if the curve has none."""
        return max((value for _, value in self.points(curve)), default=None)

    def steps_to(self, loss: float) -> float | None:
        """Steps until the validation loss first reached ``loss``; see ``steps_to_reach``.

        Infinity if the run ended above it, None if it has not ended.
        """
        steps = steps_to_reach(loss, self.points("validation_loss"))
        if steps is not None:
            return steps
        return math.inf if self.has_ended else None


@dataclass(frozen=True)
class Records:
    """Records in the order of their trials."""

    all: tuple[TrialRecord, ...]

    @property
    def panels(self) -> list[str]:
        """The panels, in order."""
        return list(dict.fromkeys(record.panel for record in self.all))

    @property
    def series(self) -> list[str]:
        """The series, in order."""
        return list(dict.fromkeys(record.series for record in self.all))

    def panel_suffix(self, panel: str) -> str:
        """The panel as a suffix of a comparison's label; empty if there is only one panel."""
        return f", {panel}" if len(self.panels) > 1 else ""

    def by_panel_and_series(self) -> Iterator[tuple[str, str, Records]]:
        """Yield the records of each series in each panel, in order."""
        for panel in self.panels:
            for series in self.of(panel=panel).series:
                yield panel, series, self.of(panel=panel, series=series)

    def where(self, predicate: Callable[[TrialRecord], bool]) -> Records:
        """The records for which ``predicate`` is true."""
        return Records(tuple(record for record in self.all if predicate(record)))

    def of(self, *, panel: str | None = None, series: str | None = None) -> Records:
        """The records of a panel, a series, or both."""
        return self.where(lambda record: panel in (None, record.panel) and series in (None, record.series))

    def by_seed(
        self, quantity: Callable[[TrialRecord], float | None], *, diverged: float | None = None
    ) -> BySeed:
        """A quantity of each record by seed, without the records that do not have it.

        Runs that have not ended are left out, because their numbers cover only their first steps. Those of
        a run that diverged do too, so ``diverged`` can replace them: with infinity where such a run counts
        as worse than any other, with NaN where it says nothing.
        """
        values = {
            record.config.seed: diverged if record.diverged and diverged is not None else quantity(record)
            for record in self.all
            if record.has_ended
        }
        return {seed: value for seed, value in values.items() if value is not None}

    def final_losses(self) -> BySeed:
        """The final validation losses by seed; infinity if the run diverged."""
        return self.by_seed(TrialRecord.final_loss)

    @property
    def optimizers(self) -> dict[str, str]:
        """The optimizer of each series."""
        return {record.series: record.config.optimizer.name for record in self.all}

    def lines(self, points_of: Callable[[TrialRecord], Sequence[Point]]) -> list[Line]:
        """A line for each run that has points."""
        return [
            (record.folder.name, points, record.diverged)
            for record in self.all
            if (points := points_of(record))
        ]

    def curves(self, name: str, *, over_tokens: bool = False) -> Lines:
        """A measured curve of every run that has it, by series, over steps or tokens."""

        def points(record: TrialRecord) -> list[Point]:
            size = record.tokens_per_step if over_tokens else 1
            return [(step * size, value) for step, value in record.points(name)]

        return {series: self.of(series=series).lines(points) for series in self.series}

    @property
    def statuses(self) -> str:
        """The number of runs with each status, as text."""
        kinds = [record.status for record in self.all]
        return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))

    @property
    def trouble(self) -> list[str]:
        """A line for each run that did not finish."""
        return [
            f"{record.folder.name}: {_describe(record)}" for record in self.all if record.status != "finished"
        ]


def spread_text(values: BySeed, number: str = ".3f") -> str:
    """Mean and standard deviation of the finite values over seeds."""
    finite_ones = tuple(value for value in values.values() if math.isfinite(value))
    return Spread(finite_ones).text(number) if finite_ones else NOTHING


def plan(
    trials: Iterable[EntryTrial], folder: Path, corpus: CorpusIdentity
) -> list[tuple[EntryTrial, Trial]]:
    """Each trial with its run's configuration for the data, and a directory named after both.

    Entries that need the same run share it. Another configuration or other data make another run.
    """
    planned = []
    for trial in trials:
        config = replace(trial.config, data=corpus.folder).resolve(corpus.vocab_size)
        identity = _identity(config, corpus)
        model, optimizer = config.model, config.optimizer
        name_parts = [
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
        planned.append((trial, Trial(folder / "-".join(name_parts), config)))
    return planned


def _identity(config: TrainConfig, corpus: CorpusIdentity) -> str:
    # With the module names from when the first runs were kept, so that moving a module changes no run.
    name = config.optimizer.name.replace("merit_lab.", "merit_optim.lab.")
    config = replace(config, optimizer=replace(config.optimizer, name=name))
    return hashlib.sha256(f"{config.fingerprint} {corpus.fingerprint}".encode()).hexdigest()


def read(planned: Sequence[tuple[EntryTrial, Trial]]) -> Records:
    """Read what the runs have recorded so far."""
    return Records(
        tuple(
            TrialRecord(
                replace(shown, config=trial.config),
                trial.folder,
                MeasuredRun.read(Run.open(trial.folder)) if trial.exists else None,
            )
            for shown, trial in planned
        )
    )


def _describe(record: TrialRecord) -> str:
    if record.run is None:
        return "not run"
    messages = [row["message"] for row in record.run.rows.get("event", []) if row["what"] == record.status]
    return f"{record.status}: {messages[-1]}" if messages else record.status
