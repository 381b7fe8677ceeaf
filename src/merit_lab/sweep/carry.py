"""Whether a learning rate carries over to another model, batch or length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from merit_lab.study.valley import Valley
from merit_lab.sweep.ledger import Best


def lowest_value(best: Best) -> float | None:
    """Where the loss is lowest by the best value and its neighbours; None if one of these has no loss.

    It is the minimum of a parabola over the logarithm of the value, which is a learning rate in most sweeps.
    """
    points = [
        (cell.number(best.line.axis), cell.whole_loss.mean)
        for cell in (best.neighbours[0], best.cell, best.neighbours[1])
        if cell is not None and cell.whole_loss is not None
    ]
    if len(points) < 3 or points[0][0] <= 0:
        return None
    valley = Valley.through(*((math.log(value), loss) for value, loss in points))
    return math.exp(valley.place) if valley else None


def exponent(bests: Sequence[Best], field: str) -> float | None:
    """The power of a field that the best values follow; None if one of them is at an edge of the grid."""
    sizes = [best.cell.number(field) for best in bests]
    values = [lowest_value(best) for best in bests]
    if len(bests) < 2 or min(sizes) <= 0 or None in values:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log([value for value in values if value]), deg=1)
    return float(slope)


def cost_of_keeping(kept: Best, best: Best) -> float | None:
    """How far another line's best value ends above this line's best; None if that is not known.

    It is infinite if a run diverged.
    """
    for cell in best.line.cells:
        if cell.number(best.line.axis) == kept.value and cell.is_done:
            return math.inf if cell.whole_loss is None else cell.whole_loss.mean - best.loss.mean
    return None
