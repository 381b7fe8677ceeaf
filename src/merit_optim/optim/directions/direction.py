"""What a direction is: how the history of a weight's gradients becomes d, the first half of an update.

    d, state <- direction(g, state)
    u = d + weight_decay*w

The second half, the ratios that scale u, is in ``algorithm.py`` and knows no direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.matrices import Matrices, View


class Extent(NamedTuple):
    """The size of a whole matrix, and which of its rows a rank has."""

    num_rows: int
    num_columns: int
    rows: slice = slice(None)


class Sent(NamedTuple):
    """A tensor that crosses ranks for the sake of one whole matrix."""

    dtype: torch.dtype
    shape: tuple[int, int] | None = None
    """None: the matrix's own, and each rank has the part of it that it has of the weight."""
    by_rows: bool = False
    """Whether ranks share the rows of a tensor that has a shape of its own; else each has all of it."""


class Traffic(NamedTuple):
    """What crosses ranks where a matrix is cut: to where it is whole, and back."""

    gathered: tuple[Sent, ...]
    formed: tuple[Sent, ...]


@dataclass(frozen=True, kw_only=True)
class Direction(ABC):
    """A direction with its options, which stand in a parameter group under the same names."""

    NAME: ClassVar[str]
    """What ``group["direction"]`` says."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def options(self) -> dict[str, Any]:
        """What a parameter group has to say for this direction."""
        return {"direction": self.NAME, **{name: getattr(self, name) for name in self.option_names()}}

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors, the same for every parameter of a group."""

    @abstractmethod
    def check(self) -> None:
        """Raise if an option is not allowed."""

    def refusal(self, view: View, matrices: Matrices) -> str | None:
        """Why a parameter with these matrices cannot have this direction, or None."""
        del view, matrices
        return None

    def refused_options(self, group: dict[str, Any]) -> str | None:
        """Why another option of the group cannot be had with this direction, or None."""
        del group
        return None

    def shapes(self, matrices: Matrices) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each state tensor; None for the parameter's own."""
        del matrices
        return (None,) * len(self.keys)

    @property
    def keys_by_rows(self) -> tuple[str, ...]:
        """State with a shape of its own whose rows the ranks share that share a matrix.

        Of other state with a shape of its own, each of them has all.
        """
        return ()

    @abstractmethod
    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """d and the new state, of the gradient of one or several stacked matrices.

        Pure: nothing is changed. d has the gradient's dtype and is formed from the state as it is stored, in
        the dtypes that ``state`` has. ``step`` counts from 1. No d (None) says that this step only prepares:
        the weight stays as it is.
        """


@dataclass(frozen=True, kw_only=True)
class MatrixDirection(Direction):
    """A direction that needs whole matrices, in three phases of which only the middle one sees them.

    Where a weight is sharded, each rank has the first and the last phase for its own part, and one rank the
    middle one for a whole matrix.
    """

    @abstractmethod
    def before(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the whole matrices are formed of, and the new state. Every element for itself."""

    @abstractmethod
    def whole(self, gathered: tuple[Tensor, ...], step: float | Tensor) -> tuple[Tensor | None, ...]:
        """What ``after`` needs, of whole matrices."""

    @abstractmethod
    def after(
        self,
        formed: tuple[Tensor | None, ...],
        state: tuple[Tensor, ...],
        dtype: torch.dtype,
        extent: Extent,
        step: float | Tensor = 1,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """d in ``dtype`` and the new state, of what ``whole`` formed, or of a rank's part of it.

        Where ``whole`` formed none of a tensor, a rank may have zeros for it.
        """

    @abstractmethod
    def traffic(self, rows: int, columns: int, dtype: torch.dtype) -> Traffic:
        """The tensors of ``before`` and ``whole`` for a matrix of this size whose gradient has ``dtype``."""

    @abstractmethod
    def num_operations(self, rows: int, columns: int) -> int:
        """About what ``whole`` costs for such a matrix. By this, matrices are shared out among ranks."""

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        gathered, state = self.before(grad_NRC, state)
        _, rows, columns = grad_NRC.shape
        return self.after(self.whole(gathered, step), state, grad_NRC.dtype, Extent(rows, columns), step)
