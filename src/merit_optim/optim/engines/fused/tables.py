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

from merit_optim.optim.engines.fused.kernels import CHUNK
from merit_optim.optim.engines.plan import Slot


class Tile(NamedTuple):
    """What one program works on: blocks of ``rows`` x ``columns``, below each other, by ``warps`` warps."""

    rows: int
    columns: int
    steps: int
    """How many blocks."""
    warps: int
    max_registers: int | None = None

    @property
    def launch_options(self) -> dict[str, int | None]:
        return {
            "BLOCK_R": self.rows,
            "BLOCK_C": self.columns,
            "STEPS": self.steps,
            "num_warps": self.warps,
            "maxnreg": self.max_registers,
            # Every product and sum is rounded by itself, so that a gradient scaled in the kernel gives the
            # bits of one scaled before. Arithmetic is not what a step waits for.
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
    scale: float = 1.0
    """What a direction that is held is multiplied by."""
    held_at: int = 0
    """Where that direction begins, in elements, among those of the launch."""


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
    """A number of columns that divides a vector's size, as near to a tile's width as can be.

    A multiple of 16 if the size is one: the kernels are told so (``ALIGNED``).
    """
    step = 16 if size % 16 == 0 else 1
    widest = min(size, widest) // step * step
    return next(columns for columns in range(widest, 0, -step) if size % columns == 0)


class Grid(NamedTuple):
    """The weights of a launch, cut into tiles; on the device, but for the last."""

    tile: Tile
    num_programs: int
    schedule: Tensor
    """(program // CHUNK, 2)."""
    weights: Tensor
    """(weight, NUM_FIELDS)."""
    num_tiles: list[int]
    """(weight,)."""


def grid_of(weights: Sequence[Weight], tile: Tile, device: torch.device) -> Grid:
    """Cut weights into tiles."""
    rows: list[tuple[int, ...]] = []
    schedule: list[tuple[int, int]] = []
    num_tiles: list[int] = []
    total = 0
    for i, w in enumerate(weights):
        num = math.ceil(w.columns / tile.columns) * math.ceil(w.rows / (tile.rows * tile.steps))
        places = (w.rows_at, w.columns_at, w.whole_at, int(w.has_rows), w.group, w.held_at)
        rows.append((w.rows, w.columns, *places, total, num))
        schedule += [(i, first) for first in range(0, num, CHUNK.value)]
        num_tiles.append(num)
        total += num
    return Grid(
        tile,
        len(schedule) * CHUNK.value,
        torch.tensor(schedule, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int64, device=device),
        num_tiles,
    )
