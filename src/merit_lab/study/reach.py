"""How many steps a run needed to reach a validation loss."""

from __future__ import annotations

import math
from collections.abc import Iterable


def steps_to_reach(target: float, losses: Iterable[tuple[int, float]]) -> float | None:
    """The step at which the loss first reached ``target``; None if it never did.

    ``losses`` are (step, loss) pairs in the order of steps. Between two validations the loss is interpolated
    linearly.

    Example:
        >>> steps_to_reach(3.0, [(0, 5.0), (10, 3.5), (20, 2.5)])
        15.0
    """
    before: tuple[int, float] | None = None
    for step, loss in losses:
        if loss <= target:
            if before is None:
                return float(step)
            step_before, loss_before = before
            return step_before + (step - step_before) * (loss_before - target) / (loss_before - loss)
        before = (step, loss) if math.isfinite(loss) else None
    return None
