"""The tables that the Triton kernels read: which program works on which tile of which weight.

Made once for a set of parameters; only addresses and numbers that change from step to step are sent
again. The layout of the rows is that of ``kernels.py``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.engines.kernels import APPLY, MOMENTS, PER_SEGMENT
from merit_optim.optim.engines.plan import Slot


class Tile(NamedTuple):
    """What one program works on: ``steps`` blocks of ``rows`` x ``columns``, by ``warps`` warps."""

    rows: int
    columns: int
    steps: int
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


def num_tiles_of(weight: Weight, tile: Tile) -> int:
    """Into how many tiles a weight is cut."""
    return math.ceil(weight.columns / tile.columns) * math.ceil(weight.rows / (tile.rows * tile.steps))


class Segment(NamedTuple):
    """Some tiles of a weight, in one phase, one after the other."""

    phase: int
    weight: int
    start: int
    stop: int


class Schedule(NamedTuple):
    """Which ticket works on what, on the device."""

    num_tickets: int
    schedule: Tensor
    """(ticket // PER_SEGMENT,): its segment."""
    segments: Tensor
    """(segment, NUM_FIELDS)."""
    weight_of: Tensor
    """(segment,): its weight; on the host."""


def schedule_of(
    order: Sequence[Segment], weights: Sequence[Weight], num_tiles: Sequence[int], device: torch.device
) -> Schedule:
    """Lay out segments one after the other."""
    tiles_at = [0, *accumulate(num_tiles)]
    rows: list[list[int]] = []
    lengths: list[int] = []
    ticket = 0
    for phase, weight, start, stop in order:
        w = weights[weight]
        places = (w.rows_at, w.columns_at, w.whole_at, int(w.has_rows), w.group)
        tiles = (tiles_at[weight], num_tiles[weight])
        rows.append([phase, ticket, start, stop - start, weight, w.rows, w.columns, *places, *tiles])
        lengths.append(math.ceil((stop - start) / PER_SEGMENT.value))
        ticket += lengths[-1] * PER_SEGMENT.value
    segment_of = torch.repeat_interleave(torch.arange(len(order), dtype=torch.int32), torch.tensor(lengths))
    return Schedule(
        ticket,
        segment_of.to(device),
        torch.tensor(rows, dtype=torch.int64, device=device),
        torch.tensor([segment.weight for segment in order]),
    )


def one_phase(num_tiles: Sequence[int], phase: int) -> list[Segment]:
    """All weights in one phase; the apply phase backwards, after what is still in the cache."""
    order = [Segment(phase, weight, 0, num) for weight, num in enumerate(num_tiles)]
    return order if phase == MOMENTS.value else order[::-1]


def both_phases(num_tiles: Sequence[int], lead: int) -> list[Segment]:
    """Each weight's apply tiles as soon as ``lead`` other tiles stand between them and its moments.

    The lead keeps programs busy while the last moments tiles of a weight end; the shorter it is, the
    more of the weight is still in the cache.
    """
    order: list[Segment] = []
    waiting: deque[tuple[int, int]] = deque()  # weights, and the tile count at which they may follow
    count = 0

    def add(phase: int, weight: int, start: int, stop: int) -> None:
        nonlocal count
        order.append(Segment(phase, weight, start, stop))
        count += stop - start

    for weight, num in enumerate(num_tiles):
        done = 0
        while done < num:
            stop = num if not waiting else min(num, done + max(0, waiting[0][1] - count))
            if stop > done:
                add(MOMENTS.value, weight, done, stop)
                done = stop
            while waiting and count >= waiting[0][1]:
                ready = waiting.popleft()[0]
                add(APPLY.value, ready, 0, num_tiles[ready])
        waiting.append((weight, count + lead))
    for weight, _ in waiting:
        add(APPLY.value, weight, 0, num_tiles[weight])
    return order
