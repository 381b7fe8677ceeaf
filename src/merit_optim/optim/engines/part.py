"""What an engine gives a step: some of its weights, to be worked on in phases.

Between *advance* and *apply* stand the sizes of the weights and their updates, in one flat buffer for a part.
Where weights are sharded, those are what the ranks have to agree on. A direction that needs whole matrices
is then advanced in two phases, *before* and *after*, and between them one rank forms what is missing of each
whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from merit_optim.optim.directions import Extent, MatrixDirection
from merit_optim.optim.engines.plan import Slot
from merit_optim.optim.matrices import View
from merit_optim.optim.statistics import Recorder

Formed = tuple[Tensor | None, ...]
"""What a direction's ``whole`` gives."""


class Place(NamedTuple):
    """Where an engine keeps the sizes of a parameter: a (2, length) buffer and its part of it.

    A parameter that is split has one for each of its matrices, in their order.
    """

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


@runtime_checkable
class MatrixPart(Part, Protocol):
    """Weights whose directions need whole matrices. Where ranks share them, ``advance`` is in two phases."""

    @property
    def owners(self) -> list[Tensor]:
        """The parameters as their groups have them."""

    @property
    def is_cut(self) -> bool:
        """Whether no rank has the whole matrices."""

    def before(self) -> list[tuple[Tensor, ...]]:
        """For each weight what whole matrices are formed of: this rank's part, as (N, R, C)."""

    def after(self, formed: Sequence[Formed]) -> None:
        """The rest of ``advance``, with what was formed for each weight: this rank's part again."""


class Whole(NamedTuple):
    """A matrix that was put together, for its direction's ``whole``."""

    group: dict[str, Any]
    """Of the parameter that it belongs to."""
    direction: MatrixDirection
    gathered: tuple[Tensor, ...]
    """What ``before`` gave, each of the tensors as (1, R, C) and contiguous, as in one process."""
    step: float | Tensor


Form = Callable[[Iterable[Whole]], Iterable[Formed]]
"""An engine's way to form what is asked of whole matrices: one by one, or many at once."""


class Share(NamedTuple):
    """What of a weight's matrices is worked on here."""

    view: View
    """How this part is seen: split where the whole weight is."""
    extents: tuple[Extent, ...]
    """Of each matrix of the whole weight that has a direction of its own: its size, and the rows here."""
    is_cut: bool
    """Whether the rest of these matrices is on other ranks."""
