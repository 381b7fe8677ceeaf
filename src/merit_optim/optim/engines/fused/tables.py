"""The tables that the Triton kernels read: which program processes which tile of which weight.

Built once for a set of parameters; only addresses and numbers that change between steps are sent again.
``layout.py`` defines the layout of the rows.
"""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.engines.fused.layout import CHUNK
from merit_optim.optim.engines.plan import Slot
from merit_optim.optim.engines.work import Work
from merit_optim.optim.matrices import Extent


class Tile(NamedTuple):
    """The tile of one program: ``steps`` blocks of ``rows`` x ``columns``, stacked by rows."""

    rows: int
    columns: int
    steps: int
    """Number of blocks."""
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
            # Products and sums are rounded separately, so that a gradient scaled in the kernel gives the same
            # bits as one scaled before. Arithmetic is not the bottleneck of a step.
            "enable_fp_fusion": False,
        }


class KernelWeight(NamedTuple):
    """One matrix of one parameter, as the kernels see it."""

    item: int
    """The index of its parameter."""
    part: int
    """Which of the matrices that its parameter is split into; 0 if it is not."""
    offset: int
    """The offset of its first element in the parameter."""
    rows: int
    columns: int
    rows_at: int
    columns_at: int
    whole_at: int
    """Offsets of the sizes of its rows, of its columns and of the whole in the sizes buffers."""
    has_rows: bool
    group: int
    scale: float = 1.0
    """The factor of a held direction."""
    held_at: int = 0
    """The offset of that direction, in elements, among those of the launch."""
    factors_at: int = 0
    """The offset of NorMuon's factors of its outputs, likewise."""
    averages_at: int = 0
    """The offset of NorMuon's averages of its outputs among those of its parameter."""
    radius_at: int = 0
    """The address of a sphere's radius, of which there is one for each row of the whole matrix."""
    named_radius: float = 0.0
    """The one that ``gain`` names; 0 for the norm at the start."""
    extent: Extent | None = None
    """The whole matrix of a held direction, of which this may be a part."""

    @property
    def is_first(self) -> bool:
        """Whether it represents its parameter. A rank may have no rows of some of the parts."""
        return self.offset == 0 and self.rows > 0


def weights_of(item: int, slots: Sequence[Slot], group: int) -> list[KernelWeight]:
    """The matrices of a parameter, in the order of its elements.

    ``slots``: one, or one for each of the matrices that its rows are split into. A vector is folded into
    rows, because only its whole size is used.
    """
    num, _, columns, is_vector = slots[0].matrices
    width = _fold(columns) if is_vector else columns
    lengths = [slot.matrices.rows for slot in slots]
    *starts, total = accumulate(lengths, initial=0)
    return [
        KernelWeight(
            item=item,
            part=part,
            offset=(n * total + start) * columns,
            rows=rows * columns // width,
            columns=width,
            rows_at=slot.start + n * rows,
            columns_at=slot.columns_start + n * columns,
            whole_at=slot.whole_start + n,
            has_rows=slot.has_rows,
            group=group,
        )
        for n in range(num)
        for part, (slot, rows, start) in enumerate(zip(slots, lengths, starts, strict=True))
    ]


def _fold(size: int, widest: int = 128) -> int:
    """The number of columns, up to ``widest``, that divides a vector's size and is nearest to ``widest``.

    It is a multiple of 16 if the size is one, as ``ALIGNED`` promises to the kernels.
    """
    step = 16 if size % 16 == 0 else 1
    widest = min(size, widest) // step * step
    return next(columns for columns in range(widest, 0, -step) if size % columns == 0)


class TileGrid(NamedTuple):
    """The weights of a launch, divided into tiles. Tensors are on the device."""

    tile: Tile
    num_programs: int
    schedule: Tensor
    """(program // CHUNK, 2)."""
    weights: Tensor
    """(weight, NUM_FIELDS)."""
    num_tiles: list[int]
    """(weight,)."""


def grid_of(weights: Sequence[KernelWeight], tile: Tile, device: torch.device) -> TileGrid:
    """Divide weights into tiles."""
    rows: list[tuple[int, ...]] = []
    schedule: list[tuple[int, int]] = []
    num_tiles: list[int] = []
    total = 0
    for i, w in enumerate(weights):
        num = math.ceil(w.columns / tile.columns) * math.ceil(w.rows / (tile.rows * tile.steps))
        places = (w.rows_at, w.columns_at, w.whole_at, int(w.has_rows), w.group, w.held_at, w.factors_at)
        rows.append((w.rows, w.columns, *places, total, num))
        schedule += [(i, first) for first in range(0, num, CHUNK.value)]
        num_tiles.append(num)
        total += num
    return TileGrid(
        tile,
        len(schedule) * CHUNK.value,
        torch.tensor(schedule, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int64, device=device),
        num_tiles,
    )


class StepTensors(NamedTuple):
    """All tensors of a step on one device, in parallel lists."""

    params: list[Tensor]
    grads: list[Tensor]
    firsts: list[Tensor]
    """The first state of each: m of Adam's direction, the momentum of Muon's."""
    seconds: list[Tensor]
    """v of Adam's direction, the averages of NorMuon's. For Muon's the momentum again, unused."""
    steps: list[Tensor]

    @staticmethod
    def of(works: Sequence[Work]) -> StepTensors:
        return StepTensors(
            [x for work in works for x in work.params],
            [x for work in works for x in work.grads],
            [x for work in works for x in work.states[0]],
            [x for work in works for x in work.states[1 if len(work.spec.direction.keys) > 1 else 0]],
            [x for work in works for x in work.steps],
        )

    def addresses(self) -> array.array[int]:
        return array.array("q", map(Tensor.data_ptr, chain.from_iterable(self)))
