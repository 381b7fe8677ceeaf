"""The interface of directions: how the history of a weight's gradients becomes d.

    d, state <- direction(g, state)
    u = d + weight_decay*w

The ratios that scale u, and the holds that change w, do not depend on the direction.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.choice import Choice
from merit_optim.optim.matrices import Extent


class Sent(NamedTuple):
    """A tensor that crosses ranks for one whole matrix."""

    dtype: torch.dtype
    shape: tuple[int, int] | None = None
    """None: the matrix's shape, cut like the weight."""
    by_rows: bool = False
    """Whether ranks split the rows of a tensor with another shape; otherwise each holds all of it."""


class Traffic(NamedTuple):
    """The tensors that cross ranks if a matrix is cut: those sent to its owner, and the results."""

    gathered: tuple[Sent, ...]
    formed: tuple[Sent, ...]


@dataclass(frozen=True, kw_only=True)
class Direction(Choice):
    """A direction with its options, which have the same names in a parameter group."""

    AXIS: ClassVar[str] = "direction"
    USES_STEP: ClassVar[bool] = True
    """Whether d depends on the number of the step."""
    READS_STEP: ClassVar[bool] = False
    """Whether the host reads that number for every matrix. It is then kept there, so that no read waits."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors. The first has the parameter's shape."""

    @abstractmethod
    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Return d and the new state, given the gradient of one or several stacked matrices.

        This is a pure function. d has the gradient's dtype and is computed from the state as stored, in the
        dtypes of ``state``. ``step`` counts from 1. If d is None, this step does not change the weight.
        """


@dataclass(frozen=True, kw_only=True)
class MatrixDirection(Direction):
    """A direction that needs whole matrices, in three phases of which only the middle one uses them.

    If a weight is sharded, each rank runs the first and the last phase for its part, and one rank the middle
    phase for a whole matrix.
    """

    @abstractmethod
    def before(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the inputs of ``whole`` and the new state. This phase is element-wise."""

    @abstractmethod
    def whole(self, gathered: tuple[Tensor, ...], step: float | Tensor) -> tuple[Tensor | None, ...]:
        """Return the inputs of ``after``, given whole matrices."""

    @abstractmethod
    def after(
        self,
        formed: tuple[Tensor | None, ...],
        state: tuple[Tensor, ...],
        dtype: torch.dtype,
        extent: Extent,
        step: float | Tensor = 1,
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Return d in ``dtype`` and the new state, given the result of ``whole`` or a rank's part of it.

        If ``whole`` returned None for a tensor, a rank may get zeros for it.
        """

    @abstractmethod
    def traffic(self, rows: int, columns: int, dtype: torch.dtype) -> Traffic:
        """The tensors of ``before`` and ``whole`` for a matrix of this size whose gradient has ``dtype``."""

    @abstractmethod
    def num_operations(self, rows: int, columns: int) -> int:
        """The approximate cost of ``whole`` for such a matrix, used to assign matrices to ranks."""

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        gathered, state = self.before(grad_NRC, state)
        _, rows, columns = grad_NRC.shape
        return self.after(
            self.whole(gathered, step), state, grad_NRC.dtype, Extent.whole(rows, columns), step
        )
