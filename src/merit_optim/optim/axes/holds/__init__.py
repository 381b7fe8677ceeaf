"""The holds: what keeps a weight's size."""

from merit_optim.optim.axes.holds.decay import Ball, Cautious, Corrected, Decay, Decoupled, Shares
from merit_optim.optim.axes.holds.displacement import Displacement
from merit_optim.optim.axes.holds.hold import Hold, Move, Products
from merit_optim.optim.axes.holds.rows import Rows
from merit_optim.optim.axes.holds.sphere import Sphere

__all__ = [
    "Ball",
    "Cautious",
    "Corrected",
    "Decay",
    "Decoupled",
    "Displacement",
    "Hold",
    "Move",
    "Products",
    "Rows",
    "Shares",
    "Sphere",
]
