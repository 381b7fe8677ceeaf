"""How arrays are seen as matrices.

Arrays keep their shapes: rows and columns are sets of axes, and sizes are reduced over them with the axes
kept. So a sharded array is never reshaped, and XLA moves only those sizes between devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Axes = tuple[int, ...]
_SIDES = ("rows", "columns")


@dataclass(frozen=True)
class View:
    """How an array is seen as matrices; each has a direction, ratios and a hold of its own.

    Args:
        rows: the axes of the rows; negative ones count from the last axis. None: the first axis.
        columns: the axes of the columns; None: all but the first. Axes that are neither stack matrices.
            An array without rows or without columns is a vector, which has only one ratio.
        split: how many matrices of equal size lie side by side, or the length of each.
        split_dim: 0 splits the rows, 1 the columns; None the outputs.
        outputs: "columns", as in Flax's kernels, or "rows", as in Equinox.

    Examples:
        >>> View(rows=(0, 1), columns=(2,)).of((4, 16, 64)).rows  # heads, head size -> width
        (0, 1)
        >>> View(split=3).of((64, 192)).lengths  # query, key and value
        (64, 64, 64)
    """

    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    split: int | Sequence[int] | None = None
    split_dim: int | None = None
    outputs: Literal["rows", "columns"] = "columns"

    def __post_init__(self) -> None:
        for name in _SIDES:
            axes = getattr(self, name)
            if axes is not None and not (isinstance(axes, Sequence) and all(map(_is_integer, axes))):
                raise ValueError(f"{name} is {axes!r}; it must be a sequence of axes, such as (0,) or (0, 1)")
        if (self.rows is None) != (self.columns is None):
            raise ValueError(f"{self} names one side of a matrix; give both rows and columns, or neither")
        if self.split is not None and not all(map(_is_count, np.atleast_1d(self.split).tolist())):
            raise ValueError(
                f"split is {self.split!r}; it must be a number of matrices, their lengths, or None"
            )
        if self.split_dim not in (None, 0, 1):
            raise ValueError(f"split_dim is {self.split_dim!r}; it must be 0 (rows), 1 (columns) or None")
        if self.outputs not in _SIDES:
            raise ValueError(f"outputs is {self.outputs!r}; it must be 'rows' or 'columns'")

    def of(self, shape: Sequence[int]) -> Matrices:
        """Return the matrices in an array of this shape."""
        ndim = len(shape)
        if self.rows is None or self.columns is None:
            return self._divided(*_first_and_rest(range(ndim)), shape)
        named = (*self.rows, *self.columns)
        if not all(-ndim <= axis < ndim for axis in named):
            raise ValueError(f"{self} names an axis that an array of {ndim} dimensions does not have")
        if len({axis % ndim for axis in named}) < len(named):
            raise ValueError(f"{self} names an axis twice in an array of {ndim} dimensions")
        rows, columns = (tuple(axis % ndim for axis in side) for side in (self.rows, self.columns))
        return self._divided(rows, columns, shape)

    def _divided(self, rows: Axes, columns: Axes, shape: Sequence[int]) -> Matrices:
        outputs, inputs = (rows, columns) if self.outputs == "rows" else (columns, rows)
        if self.split is None:
            return Matrices(rows, columns, outputs, inputs)
        axes = outputs if self.split_dim is None else (rows, columns)[self.split_dim]
        if len(axes) != 1 or not (rows and columns):
            raise ValueError(
                f"split={self.split!r} needs a matrix with one axis to cut, and has {axes} in the shape "
                f"{tuple(shape)}; use split=None, or leave an axis out of rows and columns to stack matrices"
            )
        length = shape[axes[0]]
        even = (length // self.split,) * self.split if isinstance(self.split, int) else self.split
        if sum(even) != length:
            raise ValueError(
                f"split={self.split!r} does not divide a length of {length}; give lengths that add up to "
                f"{length}, a number that divides it, or split=None"
            )
        return Matrices(rows, columns, outputs, inputs, axes[0], tuple(even))


@dataclass(frozen=True)
class Matrices:
    """The matrices in one array, by axes counted from the first."""

    rows: Axes
    columns: Axes
    outputs: Axes
    inputs: Axes
    split_axis: int | None = None
    lengths: tuple[int, ...] = ()

    @property
    def whole(self) -> Axes:
        return (*self.rows, *self.columns)

    @property
    def is_vector(self) -> bool:
        return not self.rows or not self.columns

    def each(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """Return ``function`` of these and the arrays; where they are split, of each part, joined."""
        if self.split_axis is None:
            return function(self, *arrays)
        results = [function(self, *parts) for parts in zip(*map(self._cut, arrays), strict=True)]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, self.split_axis), *results)

    def _cut(self, x: Array) -> list[Array]:
        """Cut an array, or one with a number for each part, such as the sizes of whole matrices."""
        assert self.split_axis is not None
        is_whole = x.shape[self.split_axis] == sum(self.lengths)
        lengths = self.lengths if is_whole else (1,) * len(self.lengths)
        return jnp.split(x, list(accumulate(lengths))[:-1], axis=self.split_axis)


def matrices_of(shape: Sequence[int], view: Any) -> Matrices:
    """Return how an array is seen: by a ``View``, a number of trailing axes, or None for all."""
    if isinstance(view, View) or view is None:
        return (view or View()).of(shape)
    if not _is_count(view):
        raise ValueError(
            f"view is {view!r}; it must be a View, None, or the number of trailing axes that form a matrix. "
            "Under optax.inject_hyperparams, name it in static_args."
        )
    rows, columns = _first_and_rest(range(max(0, len(shape) - view), len(shape)))
    return View(rows, columns).of(shape)


def number_of(axes: Axes, x: Array) -> int:
    """How many rows or columns these axes make."""
    return math.prod(x.shape[axis] for axis in axes)


def _first_and_rest(axes: Sequence[int]) -> tuple[Axes, Axes]:
    """The rows and columns among axes; a single one has no rows."""
    return (tuple(axes[:1]), tuple(axes[1:])) if len(axes) > 1 else ((), tuple(axes))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_integer(value) and value >= 1
