"""The interface of holds: what keeps a weight's size, the last line of a step.

    g          <- hold.before(g, w)           for most g itself
    u           = hold.inside(d, w)           d, or d + weight_decay*w
    c           = clamp(s*u)
    w          <- hold.apply(w, c)

At a rate of 0, and where c is 0 and nothing decays, every hold leaves w bit for bit as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from merit_optim.optim.axes.choice import Choice
from merit_optim.optim.axes.sums import sum_in_order
from merit_optim.optim.matrices import Extent, View


class Products(NamedTuple):
    """Sums of products over each row, as (N, R, 1), or over each column, as (N, 1, C)."""

    weight_sq: Tensor
    weight_change: Tensor
    change_sq: Tensor

    @staticmethod
    def of(weight_NRC: Tensor, change_NRC: Tensor, line_dim: int) -> Products:
        """The products w*w, w*c and c*c, summed over every dimension but that of the lines."""
        pairs = ((weight_NRC, weight_NRC), (weight_NRC, change_NRC), (change_NRC, change_NRC))
        return Products(*(sum_in_order(x * y, 3 - line_dim) for x, y in pairs))

    def of_matrices(self, line_dim: int) -> Products:
        """The sums over whole matrices, as (N, 1, 1): those of lines, added in their order."""
        return Products(*(sum_in_order(x, line_dim) for x in self))


class Move(NamedTuple):
    """What a hold may need of a step, besides the weight, the change and its own state."""

    lr: float | Tensor
    weight_decay: float
    extent: Extent
    """The size of the whole matrix, and which of its rows and columns are here."""
    line_dim: int | None = None
    """That of ``Hold.line_dim``."""
    step: float | Tensor = 1
    """The number of the step, from 1."""
    products: Products | None = None
    """Those of all lines of the whole matrix, if the hold asks for them."""


@dataclass(frozen=True, kw_only=True)
class Hold(Choice):
    """A hold with its options, which have the same names in a parameter group.

    Its functions are pure. They get whole matrices or a rank's part of them, in the dtype of the arithmetic.
    """

    AXIS: ClassVar[str] = "hold"
    USES_DECAY: ClassVar[bool] = True
    """Whether weight decay has a meaning. If not, groups that have this hold have a weight decay of 0."""
    WHOLE_ROWS: ClassVar[bool] = False
    """Whether it needs whole rows, so that ranks cannot share one."""

    def line_dim(self, view: View) -> int | None:
        """Whether it needs the products of rows, 1, or of columns, 2, of (N, R, C); None for no products."""
        return None

    def before(
        self, grad_NRC: Tensor, weight_NRC: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradient that the direction gets, and the new state."""
        return grad_NRC, state

    def inside(self, d_NRC: Tensor, weight_NRC: Tensor, weight_decay: float) -> Tensor:
        """Return u, which is what the ratio scales."""
        return d_NRC

    def apply(
        self, weight_NRC: Tensor, change_NRC: Tensor, state: tuple[Tensor, ...], move: Move
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new weight and the new state."""
        raise NotImplementedError

    def filled(self, group: dict[str, Any]) -> dict[str, Any]:
        """Options that follow from others of a new group."""
        return {}

    def blank(self, weight: Tensor) -> str | None:
        """Why a weight with these values cannot be held, or None."""
        return None
