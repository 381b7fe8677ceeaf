"""Whether a learning rate carries over to another model, batch or length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from merit_lab.study.valley import Valley
from merit_lab.sweep.ledger import Best


def lowest_rate(best: Best) -> float | None:
    """The learning rate of the lowest loss by the best rate and its neighbours; None if one has no loss.

    It is the minimum of a parabola over the logarithm of the rate.
    """
    points = [
        (math.log(cell.number(best.line.axis)), cell.loss.mean)
        for cell in (best.neighbours[0], best.cell, best.neighbours[1])
        if cell is not None and cell.is_done and cell.loss is not None and not cell.outcome.diverged
    ]
    valley = Valley.through(*points) if len(points) == 3 else None
    return math.exp(valley.place) if valley else None


def exponent(bests: Sequence[Best], field: str) -> float | None:
    """The power of a field that the best rates follow; None where one of them is not known between others."""
    sizes = [best.cell.number(field) for best in bests]
    rates = [lowest_rate(best) for best in bests]
    if len(bests) < 2 or min(sizes) <= 0 or None in rates:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log([rate for rate in rates if rate]), deg=1)
    return float(slope)


def cost_of_keeping(kept: Best, best: Best) -> float | None:
    """How far the loss at another line's best rate is above this line's best; None if it was not tried."""
    for cell in best.line.cells:
        if cell.number(best.line.axis) == kept.value:
            known = cell.is_done and not cell.outcome.diverged and cell.loss is not None
            return cell.loss.mean - best.loss.mean if known and cell.loss is not None else math.inf
    return None
