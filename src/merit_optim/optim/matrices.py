"""View a parameter as matrices: one, several stacked in leading dimensions, or several side by side.

Shape suffixes: N stacked matrices, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Matrices(NamedTuple):
    """A parameter viewed as ``num`` matrices; a vector has one row and only a whole-weight ratio."""

    num: int
    rows: int
    columns: int
    is_vector: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num, self.rows, self.columns


class Extent(NamedTuple):
    """The size of a whole matrix, and which of its rows and columns a rank has."""

    num_rows: int
    num_columns: int
    rows: slice
    columns: slice

    @staticmethod
    def whole(num_rows: int, num_columns: int) -> Extent:
        """All of a matrix."""
        # No defaults of the class: the compiler of torch 2.11 cannot trace those that are slices.
        return Extent(num_rows, num_columns, slice(None), slice(None))


def num_stacking(num_dims: int, matrix_dims: int | None) -> int:
    """Number of leading dimensions that stack matrices."""
    return 0 if matrix_dims is None else max(0, num_dims - matrix_dims)


def matrices_of(shape: torch.Size | tuple[int, ...], matrix_dims: int | None = None) -> Matrices:
    """View a parameter of this shape as matrices.

    The last ``matrix_dims`` dimensions form one matrix, (the first of them) x (all others), and the
    dimensions before them stack matrices, as experts do; ``None`` takes all dimensions, so nothing is
    stacked.

    Examples:
        >>> matrices_of((768, 3, 16, 16)).shape
        (1, 768, 768)
        >>> matrices_of((8, 1024, 4096), matrix_dims=2).shape
        (8, 1024, 4096)
    """
    num_batch_dims = num_stacking(len(shape), matrix_dims)
    num, matrix = math.prod(shape[:num_batch_dims]), shape[num_batch_dims:]
    if len(matrix) < 2:
        return Matrices(num, 1, math.prod(matrix), is_vector=True)
    return Matrices(num, matrix[0], math.prod(matrix[1:]), is_vector=False)


Split = int | tuple[int, ...] | None


class View(NamedTuple):
    """How a parameter is divided into matrices: the group options of the same names."""

    matrix_dims: int | None = None
    split: Split = None
    """Matrices concatenated along ``split_dim``: their number if of equal size, or the size of each."""
    split_dim: int = 0
    """0 splits the rows, as for query, key and value in one Linear; 1 the columns, as in a Conv1D.

    A group that does not set it splits the outputs.
    """

    @staticmethod
    def of(group: Mapping[str, Any]) -> View:
        split = group.get("split")
        split = tuple(split) if isinstance(split, list) else split  # so that views can be keys
        split_dim = group.get("split_dim")
        if split_dim is None:
            split_dim = int(group.get("transposed", False))
        return View(group.get("matrix_dims"), split, split_dim)

    def matrices(self, shape: torch.Size | tuple[int, ...]) -> Matrices:
        """The matrices of a parameter of this shape, before it is split."""
        return matrices_of(shape, self.matrix_dims)

    def lengths(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The rows (or columns) of each matrix that the parameter is split into."""
        length = self.matrices(shape).shape[1 + self.split_dim]
        if self.split is None:
            return (length,)
        return (length // self.split,) * self.split if isinstance(self.split, int) else self.split

    def split_matrices(self, shape: torch.Size | tuple[int, ...]) -> tuple[Matrices, ...]:
        """The matrices after the split; each has its own direction and ratios.

        Examples:
            >>> [matrices.shape for matrices in View(split=(4, 2, 2)).split_matrices((8, 5))]
            [(1, 4, 5), (1, 2, 5), (1, 2, 5)]
            >>> [matrices.shape for matrices in View(split=2, split_dim=1).split_matrices((8, 6))]
            [(1, 8, 3), (1, 8, 3)]
        """
        whole = self.matrices(shape)
        if self.split_dim:
            return tuple(whole._replace(columns=length) for length in self.lengths(shape))
        return tuple(whole._replace(rows=length) for length in self.lengths(shape))

    def cut(self, x: Tensor, shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, ...]:
        """Split a parameter of this shape, or its state tensor, into the (N, R, C) of each part.

        Views of ``x`` where its strides allow it.
        """
        return self.cut_matrices(self.seen(x, shape), shape)

    def seen(self, x: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """A tensor of the parameter's shape as (N, R, C); state of another shape already has this form."""
        return x.reshape(self.matrices(shape).shape) if x.shape == shape else x

    def cut_matrices(self, x_NRC: Tensor, shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, ...]:
        """Split the output of ``seen`` for a parameter of this shape, or for its state, into its parts."""
        return (x_NRC,) if self.split is None else x_NRC.split(self.lengths(shape), 1 + self.split_dim)

    def joined(self, parts: list[Tensor], like: Tensor) -> Tensor:
        """Join parts into a tensor like ``like``; the inverse of ``cut``."""
        x_NRC = parts[0] if len(parts) == 1 else torch.cat(parts, 1 + self.split_dim)
        return x_NRC.reshape(like.shape)

    def refusal(self, shape: torch.Size | tuple[int, ...]) -> str | None:
        """Why a parameter of this shape cannot be divided like this, or None."""
        if self.split is None:
            return None
        whole = self.matrices(shape)
        if whole.is_vector:
            return (
                f"split={self.split!r} needs a matrix; use split=None, or a pattern without biases, such as "
                "'*qkv.weight'"
            )
        length, axis = whole.shape[1 + self.split_dim], ("rows", "columns")[self.split_dim]
        fits = length % self.split == 0 if isinstance(self.split, int) else sum(self.split) == length
        way_out = f"give sizes that add up to {length}, a number that divides it, or split=None"
        return None if fits else f"split={self.split!r} does not divide its {length} {axis}; {way_out}"
