"""What an engine gives a step: some of its weights, to be worked on in two phases.

Between the phases stand the sizes of the weights and their updates, in one flat buffer for a part. Where
weights are sharded, those are what the ranks have to agree on.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from merit_optim.optim.engines.plan import Slot
from merit_optim.optim.statistics import Recorder


class Place(NamedTuple):
    """Where an engine keeps the sizes of a parameter: a (2, length) buffer and its part of it."""

    param: Tensor
    sizes: Tensor
    slot: Slot


class Part(Protocol):
    """Weights that an engine works on together."""

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""

    def advance(self) -> None:
        """Update the state of the directions, and measure w and u."""

    def apply(self, recorder: Recorder | None) -> None:
        """Form the ratios, and change w."""
