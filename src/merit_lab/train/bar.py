"""Where a run that is given a chance is given up."""

from __future__ import annotations

from typing import NamedTuple


class Bar(NamedTuple):
    """A validation loss that a run must be below at a step, or it is given up."""

    step: int
    loss: float
