"""An entry: a figure or table of the paper, the runs it needs and how to make it from their records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from merit_lab.paper.records import Records, TrialRecord
from merit_lab.paper.setups import EntryTrial, Scale
from merit_lab.paper.verdict import Outcome, Verdict, worst
from merit_lab.study.charts import Chart
from merit_lab.tables import Table


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """An entry's table, charts and verdicts."""

    table: Table
    charts: tuple[Chart, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    """Caveats for reading the numbers."""

    @property
    def outcome(self) -> Outcome:
        """The worst of the verdicts' outcomes."""
        return worst([verdict.outcome for verdict in self.verdicts])


class Unavailable(Exception):
    """An entry cannot be made; the message says what is missing and how to get it."""


def _no_trials(_: Scale, __: int) -> list[EntryTrial]:
    return []


@dataclass(frozen=True, kw_only=True)
class PaperEntry:
    """A figure or table: which runs it needs at a scale, and how it is made from their records."""

    name: str
    title: str
    shows: str
    """What it shows, in a few words."""
    trials: Callable[[Scale, int], list[EntryTrial]] = _no_trials
    """The trials it needs at a scale, for a number of seeds."""
    analyse: Callable[[Records, Scale], Analysis]
    """Table, charts and verdicts from the records alone."""
    measure: Callable[[TrialRecord, Scale, Path | None], None] | None = None
    """Measure a finished run's checkpoint and write the numbers to its directory, unless they are there
    already. The last argument is the folder of evaluation sets."""
    is_grid: bool = False
    """Whether it has many runs, so that it uses the scale's ``grid_seeds``."""

    def num_seeds(self, scale: Scale, seeds: int | None) -> int:
        """The number of seeds: ``seeds``, or the scale's default if that is None."""
        return seeds or (scale.grid_seeds if self.is_grid else scale.seeds)
