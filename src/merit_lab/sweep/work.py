"""A sweep from its plan to its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.study import Conclusion, Round, run_study
from merit_lab.study.page import Page
from merit_lab.sweep.extend import check_extendable, extension
from merit_lab.sweep.grid import Grid
from merit_lab.sweep.ledger import Ledger
from merit_lab.sweep.page import make_page
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class Sweep:
    """A grid, and what it grows by."""

    grid: Grid
    extend: bool

    @property
    def folder(self) -> Path:
        return self.grid.folder

    def next(self) -> Round:
        """The grid; once it is there, also what continues it where a best rate lies at its edge."""
        asked = self.grid.plan()
        if not self.extend or not all(own.exists for own in asked):
            return Round(asked)
        more = extension(self.grid, Ledger.read(self.folder, list(self.grid.fields)))
        names = ", ".join(dict.fromkeys(own.folder.name.rpartition("-")[0] for own in more))
        return Round([*asked, *more], f"The best lies at the edge of the grid; next: {names}" if more else "")

    def findings(self) -> Page:
        return make_page(Ledger.read(self.folder, list(self.grid.fields)), may_grow=not self.extend)


def sweep(
    base: TrainConfig,
    folder: Path,
    *,
    learning_rates: Mapping[str, Sequence[float]],
    fields: Mapping[str, Sequence[object]],
    seeds: Sequence[int],
    extend: bool = False,
    jobs: int = 1,
) -> Conclusion | None:
    """Train at every point of a grid, print the best ones, and write the findings into ``folder``/report.

    What is done stays done: the runs in ``folder`` are the ledger, and those of earlier calls count too.
    Several processes may work on one sweep; each takes the runs that no other is at.

    Args:
        base: what all runs share.
        folder: where the run directories are.
        learning_rates: by optimizer.
        fields: values of other fields of the configuration, by their dotted names.
        seeds: each point is trained once with each.
        extend: go on where a best learning rate lies at the edge.
        jobs: runs at the same time.
    """
    if extend:
        check_extendable(learning_rates)
    grid = Grid(base=base, folder=folder, learning_rates=learning_rates, fields=fields, seeds=seeds)
    return run_study(Sweep(grid, extend=extend), jobs)
