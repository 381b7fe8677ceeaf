"""A sweep as a study."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merit_lab.study import Round
from merit_lab.study.page import Page
from merit_lab.sweep.extend import check_extendable, extension
from merit_lab.sweep.grid import SweepGrid
from merit_lab.sweep.ledger import Ledger
from merit_lab.sweep.page import make_page


@dataclass(frozen=True)
class Sweep:
    """A grid as a study; ``extend`` lets it grow where a best rate lies at the edge.

    All runs in its folder belong to it, including those of earlier calls.
    """

    grid: SweepGrid
    extend: bool

    def __post_init__(self) -> None:
        if self.extend:
            check_extendable(self.grid.learning_rates)

    @property
    def folder(self) -> Path:
        return self.grid.folder

    def next(self) -> Round:
        """The grid and, once all its trials were started, those that extend it."""
        planned = self.grid.plan()
        if not self.extend or not all(trial.exists for trial in planned):
            return Round(planned)
        more = extension(self.grid, Ledger.read(self.folder, list(self.grid.fields)))
        names = ", ".join(dict.fromkeys(trial.folder.name.rpartition("-")[0] for trial in more))
        return Round(
            [*planned, *more], f"The best lies at the edge of the grid; next: {names}" if more else ""
        )

    def findings(self) -> Page:
        return make_page(Ledger.read(self.folder, list(self.grid.fields)), may_grow=not self.extend)
