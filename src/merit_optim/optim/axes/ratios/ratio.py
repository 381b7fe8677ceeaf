"""The interface of ratios: how the sizes of a weight and of its update scale the update.

    s = ratio(sizes of w and u)
    c = clamp(s*u, -clip, clip)

|w| / |u| of every row, every column and every whole matrix are formed by the engine; a ratio combines them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.choice import Choice

Norm = Literal["max", "l2"]
NORMS: tuple[Norm, ...] = ("max", "l2")


class Sizes(NamedTuple):
    """The norms of all rows, columns and whole matrices, or their ratios. Vectors have only the last."""

    rows_NR: Tensor | None
    columns_NC: Tensor | None
    whole_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Ratio(Choice):
    """A ratio with its options, which have the same names in a parameter group.

    A subclass says which sizes it uses, and ``combine``s their ratios.
    """

    AXIS: ClassVar[str] = "ratio"
    SCHEDULED: ClassVar[tuple[str, ...]] = ("clip",)

    clip: float | None = None
    """The bound of each element of s*u."""
    norm: Norm = "l2"
    ratio_bounds: tuple[float, float] | None = None
    """The smallest and the largest s."""

    def check(self) -> None:
        if self.clip is not None:
            validate.positive("clip", self.clip, "None for no clip")
        validate.one_of("norm", self.norm, NORMS)
        validate.bounds("ratio_bounds", self.ratio_bounds)

    @property
    def measures(self) -> Norm | None:
        """The norm in which w and u are measured; None if s needs no sizes."""
        return self.norm

    @property
    def lines(self) -> tuple[str, ...]:
        """Which of "rows" and "columns" have sizes of their own. Their undefined ratios are not scaled."""
        return ()

    @property
    def has_rows(self) -> bool:
        """Whether rows and columns are measured."""
        return bool(self.lines)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        """Return s from the ratios of a row, a column and the whole matrix, before it is bounded.

        The tensors broadcast to (N, R, C), and are None for a vector and where ``lines`` is empty.
        """
        raise NotImplementedError

    def remember(
        self, ratios: Sizes, undefined: Sizes, state: tuple[Tensor, ...]
    ) -> tuple[Sizes, tuple[Tensor, ...]]:
        """Return the ratios in view of earlier ones, and the state of these. One with ``keys`` defines it."""
        return ratios, state

    def scale(self, ratios: Sizes, undefined: Sizes | None) -> Tensor:
        """Return s, which broadcasts to (N, R, C), of whole matrices or of a block of their rows.

        Elements whose row or column has an undefined ratio are not scaled (s = 1). Otherwise the ratios of
        other rows and columns would scale a zero-initialised row, and could keep it at zero. The one ratio of
        a vector or of a whole weight is 1 where it is undefined, and is bounded like any other.
        """
        rows_NR1, columns_N1C, whole_N11 = broadcasting(ratios)
        scale = self.bounded(self.combine(rows_NR1, columns_N1C, whole_N11))
        if rows_NR1 is None or undefined is None:
            return scale
        no_rows, no_columns, _ = broadcasting(undefined)
        for line, mask in (("rows", no_rows), ("columns", no_columns)):
            if line in self.lines and mask is not None:
                scale = scale.masked_fill(mask, 1)
        return scale

    def is_bound(self, ratios: Sizes, scale: Tensor) -> Tensor | None:
        """For statistics: mark the elements whose s is a bound by the whole weight's; None without one."""
        return None

    def bounded(self, scale: Tensor) -> Tensor:
        """Clamp s to the bounds."""
        return scale if self.ratio_bounds is None else scale.clamp(*self.ratio_bounds)

    def clipped(self, scaled: Tensor) -> Tensor:
        """Clamp s*u to the clip."""
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)


def broadcasting(sizes: Sizes) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Rows, columns and wholes in shapes that broadcast to (N, R, C)."""
    rows_NR, columns_NC, whole_N = sizes
    if rows_NR is None or columns_NC is None:
        return None, None, whole_N[:, None, None]
    return rows_NR[:, :, None], columns_NC[:, None, :], whole_N[:, None, None]


def sizes(x_NRC: Tensor, ratio: Ratio, *, is_vector: bool) -> Sizes:
    """Return the norms that a ratio needs. Rows and columns only if it uses them."""

    def size(*dims: int) -> Tensor:
        if ratio.measures == "max":
            return x_NRC.abs().amax(dims)
        sum_sq = x_NRC.square().sum(dims)
        is_zero = sum_sq == 0  # there the root has no derivative, which ``differentiable`` would make NaN
        return sum_sq.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)

    if ratio.measures is None:  # a ratio of zeros is 1
        return Sizes(None, None, x_NRC.new_zeros(x_NRC.shape[0]))
    whole_N = size(1, 2)
    if is_vector or not ratio.has_rows:
        return Sizes(None, None, whole_N)
    return Sizes(size(2), size(1), whole_N)


def undefined(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Mark the undefined ratios: those of a weight or an update of size zero."""
    return (weight_size == 0) | (update_size == 0)


def quotient(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Return |w| / |u|, or 1 where it is undefined."""
    no_ratio = undefined(weight_size, update_size)
    return defined_quotient(weight_size, update_size.masked_fill(no_ratio, 1)).masked_fill(no_ratio, 1)


def defined_quotient(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Return |w| / |u|, but at most the largest float, because inf * 0 is NaN."""
    ratio = weight_size / update_size
    return ratio.clamp(max=torch.finfo(ratio.dtype).max)
