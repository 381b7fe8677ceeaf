"""Carry out a sweep, from its plan to its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.study import Conclusion, Round, run_study
from merit_lab.study.page import Page
from merit_lab.sweep.extend import check_extendable, extension
from merit_lab.sweep.grid import SweepGrid
from merit_lab.sweep.ledger import Ledger
from merit_lab.sweep.page import make_page
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class Sweep:
    """A grid as a study; ``extend`` lets it grow where a best rate lies at the edge."""

    grid: SweepGrid
    extend: bool

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

    Finished runs are not repeated. All runs in ``folder`` belong to the sweep, including those of earlier
    calls. Several processes may work on one sweep; each takes runs that no other works on.

    Args:
        base: configuration that all runs share.
        folder: folder of the run directories.
        learning_rates: learning rates by optimizer.
        fields: values of other fields of the configuration, by their dotted names.
        seeds: each point is trained once with every seed.
        extend: whether to extend the grid where a best learning rate lies at the edge.
        jobs: number of runs to train at the same time.
    """
    if extend:
        check_extendable(learning_rates)
    grid = SweepGrid(base=base, folder=folder, learning_rates=learning_rates, fields=fields, seeds=seeds)
    return run_study(Sweep(grid, extend=extend), jobs)
