"""What an optimizer's step did, as numbers for a logger."""

from __future__ import annotations

from collections.abc import Mapping

from merit_optim.optim import UpdateStatistics


def update_scalars(statistics: Mapping[str, UpdateStatistics], prefix: str = "update/") -> dict[str, float]:
    """What ``optimizer.recording()`` gave, as one flat dict: four numbers for each parameter.

    The shares of clipped and bounded elements, the largest ratio, and the relative change. Waits for the
    device.
    """
    numbers: dict[str, float] = {}
    for name, update in statistics.items():
        numbers[f"{prefix}clipped/{name}"] = update.clipped
        numbers[f"{prefix}bounded/{name}"] = update.bounded
        numbers[f"{prefix}largest_ratio/{name}"] = update.ratio_range[1]
        numbers[f"{prefix}relative_change/{name}"] = update.relative_change
    return numbers
