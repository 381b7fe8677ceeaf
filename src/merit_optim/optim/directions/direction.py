"""The interface of directions: how the history of a weight's gradients becomes d.

    d, state <- direction(g, state)
    u = d + weight_decay*w

The ratios that scale u are in ``algorithm.py`` and do not depend on the direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from merit_optim.optim.matrices import Matrices, View


class Extent(NamedTuple):
    """The size of a whole matrix, and which of its rows and columns a rank has."""

    num_rows: int
    num_columns: int
    rows: slice = slice(None)
    columns: slice = slice(None)


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
class Direction(ABC):
    """A direction with its options, which have the same names in a parameter group."""

    NAME: ClassVar[str]
    """The value of ``group["direction"]``."""
    USES_STEP: ClassVar[bool] = True
    """Whether d depends on the number of the step."""
    READS_STEP: ClassVar[bool] = False
    """Whether the host reads that number for every matrix. It is then kept there, so that no read waits."""
    HAS_KERNELS: ClassVar[bool] = False
    """Whether the fused engine can form it."""
    USES_ORIENTATION: ClassVar[bool] = False
    """Whether d depends on which dimension has the outputs, as the option ``transposed`` says."""
    SCHEDULED: ClassVar[tuple[str, ...]] = ()
    """Options that may change from step to step: nothing depends on them that is kept between steps."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def options(self) -> dict[str, Any]:
        """The options of a parameter group with this direction."""
        return {"direction": self.NAME, **{name: getattr(self, name) for name in self.option_names()}}

    def unscheduled(self) -> Self:
        """The same with the defaults of scheduled options."""
        return replace(self, **{name: getattr(type(self), name) for name in self.SCHEDULED})

    @property
    def averages(self) -> tuple[float, float]:
        """For the kernels: the decay of the average of gradients, and of that of their squares."""
        raise NotImplementedError(f"{type(self).__name__} has no kernels")

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The names of the state tensors, the same for every parameter of a group."""

    @property
    def keys_that_can_begin(self) -> tuple[str, ...]:
        """State that begins at zero where another optimizer's state, which is continued, does not have it."""
        return ()

    @abstractmethod
    def check(self) -> None:
        """Raise if an option is not allowed."""

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        """Why a parameter of this shape cannot have this direction, or None."""
        del view, shape
        return None

    def refused_options(self, group: dict[str, Any]) -> str | None:
        """Why this direction does not support another option of the group, or None."""
        del group
        return None

    def shapes(self, matrices: Matrices) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each state tensor; None for the parameter's shape."""
        del matrices
        return (None,) * len(self.keys)

    @property
    def keys_by_rows(self) -> tuple[str, ...]:
        """State that does not have the parameter's shape and whose rows are split among ranks.

        Of other such state, each rank that shares a matrix holds all.
        """
        return ()

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
        return self.after(self.whole(gathered, step), state, grad_NRC.dtype, Extent(rows, columns), step)
