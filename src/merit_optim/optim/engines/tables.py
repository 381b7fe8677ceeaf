"""The tables that the Triton kernels read: which program works on which tile of which weight.

Made once for a set of parameters; only addresses and numbers that change from step to step are sent
again. The layout of the rows is that of ``kernels.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.engines.plan import Slot


class Tile(NamedTuple):
    """What one program works on: ``steps`` blocks of ``rows`` x ``columns``, by ``warps`` warps."""

    rows: int
    columns: int
    steps: int
    warps: int

    @property
    def launch_options(self) -> dict[str, int]:
        return {
            "BLOCK_R": self.rows,
            "BLOCK_C": self.columns,
            "STEPS": self.steps,
            "num_warps": self.warps,
            # Products and sums are rounded one by one, as the definition's are, in any version of Triton.
            "enable_fp_fusion": False,
        }


class Weight(NamedTuple):
    """One matrix of one parameter, as the kernels see it."""

    item: int
    """Which parameter it belongs to."""
    offset: int
    """Where it begins, in elements from the parameter's first."""
    rows: int
    columns: int
    rows_at: int
    columns_at: int
    whole_at: int
    """Where its rows, columns and whole stand in the sizes buffers."""
    has_rows: bool
    group: int


def weights_of(item: int, slot: Slot, group: int) -> list[Weight]:
    """The matrices of a parameter. A vector is folded into rows, for only its whole counts."""
    num, rows, columns = slot.matrices.shape
    folded_rows, folded_columns = rows, columns
    if slot.matrices.is_vector:
        folded_columns = _fold(columns)
        folded_rows = columns // folded_columns
    return [
        Weight(
            item=item,
            offset=n * rows * columns,
            rows=folded_rows,
            columns=folded_columns,
            rows_at=slot.start + n * rows,
            columns_at=slot.columns_start + n * columns,
            whole_at=slot.whole_start + n,
            has_rows=slot.has_rows,
            group=group,
        )
        for n in range(num)
    ]


def _fold(size: int, widest: int = 128) -> int:
    """A number of columns that divides a vector's size, as near to a tile's width as can be."""
    return next(columns for columns in range(min(size, widest), 0, -1) if size % columns == 0)


class Grid(NamedTuple):
    """The tiles of one launch, on the device."""

    tile: Tile
    num_tiles: int
    tiles: Tensor
    """(tile,): its weight."""
    weights: Tensor
    """(weight, FIELDS)."""
    first_tiles: list[int]
    """(weight + 1,): where its tiles begin; on the host, for statistics."""


def grid_of(weights: Sequence[Weight], tile: Tile, device: torch.device) -> Grid:
    """Cut weights into tiles."""
    rows, first_tiles = [], [0]
    for w in weights:
        panels = math.ceil(w.columns / tile.columns)
        num_tiles = panels * math.ceil(w.rows / (tile.rows * tile.steps))
        places = (w.rows_at, w.columns_at, w.whole_at)
        rows.append(
            [w.rows, w.columns, *places, first_tiles[-1], num_tiles, panels, w.group, int(w.has_rows)]
        )
        first_tiles.append(first_tiles[-1] + num_tiles)
    table = torch.tensor(rows, dtype=torch.int64)
    num_tiles_of = table[:, 6]
    tiles = torch.repeat_interleave(torch.arange(len(weights), dtype=torch.int32), num_tiles_of)
    return Grid(tile, first_tiles[-1], tiles.to(device), table.to(device), first_tiles)
