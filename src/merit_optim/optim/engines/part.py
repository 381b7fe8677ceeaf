"""The interface between a step and its engines: parts, groups of weights that are updated in phases.

*advance* measures the sizes of the weights and updates (the norms of rows, columns and whole weights) in one
flat buffer per part, and *apply* uses them. If weights are sharded, ranks reduce the sizes in between. A
direction that needs whole matrices then advances in two phases, *before* and *after*; between them, one rank
processes each whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from merit_optim.optim.axes.holds import Products
from merit_optim.optim.engines.plan import Slot
from merit_optim.optim.matrices import Extent, View
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder

Formed = tuple[Tensor | None, ...]
"""The result of a direction's ``whole``."""


class Place(NamedTuple):
    """Where an engine keeps the sizes of a parameter: a (2, length) buffer and a slot in it.

    A parameter that is split has one place for each of its matrices, in order.
    """

    param: Tensor
    sizes: Tensor
    slot: Slot


class Part(Protocol):
    """Weights that an engine updates together."""

    @property
    def places(self) -> list[Place]:
        """Where the sizes of each weight are."""

    @property
    def is_cut(self) -> bool:
        """Whether the directions need whole matrices and no rank has them. It is then a ``MatrixPart``."""

    @property
    def has_products(self) -> bool:
        """Whether its hold needs products of w and c. It is then a ``ProductPart``."""

    def advance(self) -> None:
        """Update the state of the directions, and measure w and u."""

    def apply(self, recorder: Recorder | None) -> None:
        """Compute the ratios, and update w."""


class MatrixPart(Part, Protocol):
    """Weights whose directions need whole matrices. If ranks share them, ``advance`` has two phases."""

    @property
    def originals(self) -> list[Tensor]:
        """The parameters as they are in their groups."""

    def before(self) -> list[tuple[Tensor, ...]]:
        """For each weight, this rank's part of the inputs of ``whole``, as (N, R, C)."""

    def after(self, formed: Sequence[Formed]) -> None:
        """Complete ``advance`` with this rank's part of the result of ``whole`` for each weight."""


class ProductPart(Part, Protocol):
    """Weights whose hold needs products. If ranks share them, ``apply`` has two phases."""

    @property
    def originals(self) -> list[Tensor]:
        """The parameters as they are in their groups."""

    products: dict[tuple[Tensor, int], Products]
    """Those of this rank's lines, by parameter and the number of the matrix, once ``scale`` formed them."""

    def scale(self, recorder: Recorder | None) -> None:
        """Compute the ratios and c, and the products of w and c."""

    def settle(self, recorder: Recorder | None) -> None:
        """Update w, with the products of all ranks."""


class Whole(NamedTuple):
    """A matrix gathered from its ranks, for its direction's ``whole``."""

    spec: Spec
    """That of the parameter that the matrix belongs to."""
    gathered: tuple[Tensor, ...]
    """The results of ``before``, each as (1, R, C) and contiguous, as in one process."""
    step: float | Tensor


Form = Callable[[Iterable[Whole]], Iterable[Formed]]
"""An engine's way to call ``whole`` for gathered matrices: one by one, or many at once."""


class Share(NamedTuple):
    """This rank's share of a weight's matrices."""

    view: View
    """How this share is divided into matrices: split where the whole weight is split."""
    extents: tuple[Extent, ...]
    """For each matrix after the split of the whole weight: its size, and the rows on this rank."""
    is_cut: bool
    """Whether other ranks have the remaining parts of these matrices."""
