"""A sweep from its plan to its findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from merit_lab.compare import carry_out
from merit_lab.report import print_table
from merit_lab.sweep.extend import check_extendable, extension
from merit_lab.sweep.grid import Grid
from merit_lab.sweep.ledger import Ledger
from merit_lab.sweep.words import best_table
from merit_lab.sweep.write import Findings, write_findings
from merit_lab.train import TrainConfig
from merit_lab.train.parallel import Ranks


def sweep(
    base: TrainConfig,
    folder: Path,
    *,
    learning_rates: Mapping[str, Sequence[float]],
    fields: Mapping[str, Sequence[object]],
    seeds: Sequence[int],
    extend: bool = False,
) -> Findings | None:
    """Train at every point of a grid, print the best ones, and write the findings into ``folder``/report.

    What is done stays done: the runs in ``folder`` are the ledger, and those of earlier calls count too.
    Several processes may work on one sweep; each takes the runs that no other is at. Under torchrun only
    the first rank reports; the others return None.

    Args:
        base: what all runs share.
        folder: where the run directories are.
        learning_rates: by optimizer.
        fields: values of other fields of the configuration, by their dotted names.
        seeds: each point is trained once with each.
        extend: go on where a best learning rate lies at the edge.
    """
    if extend:
        check_extendable(learning_rates)
    ranks = Ranks.join()
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    grid = Grid(base=base, folder=folder, learning_rates=learning_rates, fields=fields, seeds=seeds)
    carry_out(ranks.first(grid.plan), ranks)
    if extend:
        while more := ranks.first(lambda: extension(grid, Ledger.read(folder, list(fields)))):
            names = ", ".join(dict.fromkeys(run.folder.name.rpartition("-")[0] for run in more))
            text = f"The best lies at the edge of the grid; next: {names}"
            console.print(text, markup=False, soft_wrap=True)
            carry_out(more, ranks)
    if not ranks.is_first:
        return None
    ledger = Ledger.read(folder, list(fields))
    findings = write_findings(ledger, folder / "report", may_grow=not extend)
    print_table(best_table(ledger))
    return findings
