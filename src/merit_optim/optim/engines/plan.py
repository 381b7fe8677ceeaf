"""The layout of the flat buffer of sizes, and the pieces of a weight. Pure: shapes in, offsets out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.ratios import Sizes
from merit_optim.optim.matrices import Matrices


class Slot(NamedTuple):
    """One weight's part of the buffer: its rows, then its columns, then its wholes."""

    matrices: Matrices
    has_rows: bool
    start: int

    @property
    def num_rows(self) -> int:
        return self.matrices.num * self.matrices.rows if self.has_rows else 0

    @property
    def num_columns(self) -> int:
        return self.matrices.num * self.matrices.columns if self.has_rows else 0

    @property
    def columns_start(self) -> int:
        return self.start + self.num_rows

    @property
    def whole_start(self) -> int:
        return self.columns_start + self.num_columns

    @property
    def end(self) -> int:
        return self.whole_start + self.matrices.num

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of rows, columns and wholes in the buffer."""
        return (self.num_rows, self.num_columns, self.matrices.num) if self.has_rows else (self.matrices.num,)

    def view(self, buffer: Tensor) -> Sizes:
        """Return the sizes of this weight, as views of the buffer."""
        return self.shaped(iter(torch.split_with_sizes(buffer[self.start : self.end], self.lengths)))

    def shaped(self, flat: Iterator[Tensor]) -> Sizes:
        """Take the next tensors, one for each of ``lengths``, and shape them as the sizes of this weight.

        Dimensions before the last are kept.
        """
        if not self.has_rows:
            return Sizes(None, None, next(flat))
        num, rows, columns = self.matrices.shape
        of_rows, of_columns, whole = next(flat), next(flat), next(flat)
        before = whole.shape[:-1]
        return Sizes(of_rows.view(*before, num, rows), of_columns.view(*before, num, columns), whole)


class Plan(NamedTuple):
    """The buffer's layout for all weights of a step."""

    slots: tuple[Slot, ...]
    length: int
    lengths: tuple[int, ...]
    """The lengths of all slots, in their order."""

    def views(self, buffer: Tensor) -> list[Sizes]:
        """Return the sizes of every weight as views of the buffer. One split serves all of them."""
        flat = iter(torch.split_with_sizes(buffer, self.lengths, -1))
        return [slot.shaped(flat) for slot in self.slots]


@lru_cache(maxsize=256)
def plan(weights: tuple[tuple[Matrices, bool], ...]) -> Plan:
    """Lay out the buffer for weights given as (matrices, whether their rows and columns have ratios)."""
    slots: list[Slot] = []
    end = 0
    for matrices, has_rows in weights:
        slots.append(Slot(matrices, has_rows and not matrices.is_vector, end))
        end = slots[-1].end
    return Plan(tuple(slots), end, tuple(length for slot in slots for length in slot.lengths))


class Piece(NamedTuple):
    """A block of whole rows: several matrices, or some rows of one."""

    matrices: slice
    rows: slice
    num_elements: int
    is_whole: bool
    """Whether the piece is the whole weight."""


@lru_cache(maxsize=4096)
def pieces(matrices: Matrices, max_elements: int) -> tuple[Piece, ...]:
    """Cut a weight into blocks of whole rows with at most ``max_elements`` (but at least one row)."""
    return tuple(_pieces(matrices, max_elements))


def _pieces(matrices: Matrices, max_elements: int) -> Iterator[Piece]:
    num, rows, columns = matrices.shape
    together = max_elements // max(1, rows * columns)
    if together:
        for start in range(0, num, together):
            end = min(start + together, num)
            yield Piece(slice(start, end), slice(0, rows), (end - start) * rows * columns, together >= num)
        return
    height = max(1, max_elements // max(1, columns))
    for index in range(num):
        for start in range(0, rows, height):
            end = min(start + height, rows)
            is_whole = num == 1 and height >= rows
            yield Piece(slice(index, index + 1), slice(start, end), (end - start) * columns, is_whole)
