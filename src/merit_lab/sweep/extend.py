"""Extend a grid whose best learning rate lies at its edge, by the factor between its rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merit_lab.data import Dataset
from merit_lab.study.fields import LR
from merit_lab.study.trial import Trial
from merit_lab.sweep.grid import SweepGrid
from merit_lab.sweep.ledger import Ledger, Line, best_of

MOST_RATES_BEYOND = 6
"""Maximum number of rates that an extension adds for one optimizer, below and above together."""


def check_extendable(learning_rates: Mapping[str, Sequence[float]]) -> None:
    """Raise if an optimizer has a single rate, which gives no factor to extend by."""
    for name, rates in learning_rates.items():
        if len(rates) < 2:
            raise ValueError(
                f"--extend needs the factor between two rates, but {name} has only the learning rate "
                f"{rates[0]:g}; give it two or more"
            )


def extension(grid: SweepGrid, ledger: Ledger) -> list[Trial]:
    """The trials that extend the grid; none if every best rate lies inside, or the grid has grown enough.

    The line of the best cell is extended, for each model, batch or length of the grid. If every run of an
    optimizer diverged there, all its lines of two or more rates are extended downwards. Nothing is decided
    while runs of an optimizer are unfinished: another process may be working on them.
    """
    dataset = Dataset.open(grid.base.data)
    planned = []
    for optimizer in grid.learning_rates:
        if not all(cell.is_done for cell in ledger.cells if cell.optimizer == optimizer):
            continue
        for lines in ledger.groups(optimizer):
            best = best_of(lines)
            for line in lines if best is None else [best.line]:
                edge = "lowest" if best is None else best.edge
                if edge is None or len(line.cells) < 2 or num_beyond(grid, line) >= MOST_RATES_BEYOND:
                    continue
                values = {field: line.cells[0].settings[field] for field in grid.fields}
                rate = next_rate(line.values, downwards=edge == "lowest")
                planned += [grid.run(dataset, optimizer, {**values, LR: rate}, seed) for seed in grid.seeds]
    return planned


def next_rate(rates: Sequence[float], *, downwards: bool) -> float:
    """The rate that continues ascending ``rates`` by the factor between the last two at that end.

    Example:
        >>> next_rate([0.001, 0.002, 0.006], downwards=False), next_rate([0.001, 0.002], downwards=True)
        (0.018, 0.0005)
    """
    end, inner = (rates[0], rates[1]) if downwards else (rates[-1], rates[-2])
    return float(f"{end * end / inner:.6g}")


def num_beyond(grid: SweepGrid, line: Line) -> int:
    """Number of rates of a line outside the range of the original grid."""
    planned = grid.learning_rates[line.optimizer]
    return sum(not min(planned) <= rate <= max(planned) for rate in line.values)
