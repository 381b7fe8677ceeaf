"""Loss thresholds at which a run is abandoned."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """A validation loss that a run may not exceed at a step; otherwise it is abandoned."""

    step: int
    loss: float
