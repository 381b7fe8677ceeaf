"""The axes: direction, ratio and hold. One file a choice; ``register`` adds those of users."""

from merit_optim.optim.axes import directions, holds, ratios
from merit_optim.optim.axes.registered import register

__all__ = ["directions", "holds", "ratios", "register"]
