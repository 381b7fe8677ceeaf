"""An entry: a figure or table of the paper, with what it needs and how it is made from run directories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from merit_lab.report.tables import Table
from merit_lab.reproduce.records import Record, Records
from merit_lab.reproduce.scale import Scale, Shown
from merit_lab.reproduce.verdict import Outcome, Verdict, worst
from merit_lab.study.charts import Chart


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an entry comes to."""

    table: Table
    charts: tuple[Chart, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know to judge the numbers."""

    @property
    def outcome(self) -> Outcome:
        """The worst of the verdicts' outcomes."""
        return worst([own.outcome for own in self.verdicts])


class Unavailable(Exception):
    """An entry cannot be made here; the text says what is missing and how to get it."""


def _no_trials(_: Scale, __: int) -> list[Shown]:
    return []


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure or table: which runs it needs at a scale, and how it comes from their records."""

    name: str
    title: str
    shows: str
    """What it shows, in a few words."""
    trials: Callable[[Scale, int], list[Shown]] = _no_trials
    """The runs that a scale needs with so many seeds."""
    analyse: Callable[[Records, Scale], Result]
    """Table, charts and verdicts from the records alone."""
    measure: Callable[[Record, Scale, Path | None], None] | None = None
    """Measures a finished run's checkpoint and leaves the numbers in its directory, if they are not there;
    it is given the folder of evaluation sets."""
    is_grid: bool = False
    """Whether it is of many runs, for which a scale has its own number of seeds."""

    def num_seeds(self, scale: Scale, asked: int | None) -> int:
        """How many seeds it is run with."""
        return asked or (scale.grid_seeds if self.is_grid else scale.seeds)
