"""The layout of messages between ranks that have parts of tensors and their owners, which have them whole.

Nothing is sent here. The layout depends only on shapes, so every rank computes it by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.engines.ranks.placements import Region

ALIGNMENT = 16
"""In bytes, of every tensor in a message, whatever its dtype."""


class Cut(NamedTuple):
    """A tensor of which each rank of a process group has a region."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]
    """By rank. A region may be the whole tensor, or empty."""


class Owned(NamedTuple):
    """Tensors that are whole on one rank."""

    owner: int
    cuts: tuple[Cut, ...]


class Window(NamedTuple):
    """A tensor in a buffer of bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        end = self.start + math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.start : end].view(self.dtype).view(self.shape)


class Mail:
    """What one rank sends and receives, for all tensors that its process group gathers.

    A rank has a parts buffer with its parts of all tensors, in the order of their owners, and a wholes buffer
    with the tensors that it owns, in the order of the ranks that the parts come from. On the way to the
    owners, the parts buffer is sent and the wholes buffer received; on the way back, the reverse.
    """

    def __init__(self, all_owned: Sequence[Owned], rank: int, num_ranks: int) -> None:
        self.all_owned = all_owned
        """``number`` below is an index into this list."""
        self.part_splits: list[int] = []
        """Bytes of the parts buffer for each owner."""
        self.whole_splits: list[int] = []
        """Bytes of the wholes buffer for each rank."""
        self._parts: dict[int, tuple[Window, ...]] = {}
        self._wholes: dict[int, list[tuple[Window, ...]]] = {}
        numbers: list[list[int]] = [[] for _ in range(num_ranks)]
        for number, owned in enumerate(all_owned):
            numbers[owned.owner].append(number)
        end = 0
        for of_owner in numbers:
            begun = end
            for number in of_owner:
                self._parts[number], end = _windows(all_owned[number].cuts, rank, end)
            self.part_splits.append(end - begun)
        end = 0
        for other in range(num_ranks):
            begun = end
            for number in numbers[rank]:
                windows, end = _windows(all_owned[number].cuts, other, end)
                self._wholes.setdefault(number, []).append(windows)
            self.whole_splits.append(end - begun)

    @property
    def owned(self) -> list[int]:
        """The numbers of those that this rank owns."""
        return list(self._wholes)

    def write_parts(self, number: int, parts: Sequence[Tensor], buffer: Tensor) -> None:
        """Write this rank's parts into the parts buffer."""
        for window, part in zip(self._parts[number], parts, strict=True):
            assert part.dtype == window.dtype
            window.of(buffer).copy_(part.reshape(window.shape))

    def read_parts(self, number: int, buffer: Tensor) -> tuple[Tensor, ...]:
        """This rank's parts, as views of the parts buffer."""
        return tuple(window.of(buffer) for window in self._parts[number])

    def write_wholes(self, number: int, wholes: Sequence[Tensor | None], buffer: Tensor) -> None:
        """Write every rank's parts into the wholes buffer; a tensor that is None is left out."""
        cuts, of_ranks = self.all_owned[number].cuts, zip(*self._wholes[number], strict=True)
        for cut, whole, windows in zip(cuts, wholes, of_ranks, strict=True):
            if whole is None:
                continue
            assert whole.dtype == cut.dtype
            for region, window in zip(cut.regions, windows, strict=True):
                window.of(buffer).copy_(whole.reshape(cut.shape)[region.slices])

    def read_wholes(self, number: int, buffer: Tensor) -> tuple[Tensor, ...]:
        """Assemble whole tensors from every rank's parts in the wholes buffer."""
        wholes = []
        cuts, of_ranks = self.all_owned[number].cuts, zip(*self._wholes[number], strict=True)
        for cut, windows in zip(cuts, of_ranks, strict=True):
            whole = torch.empty(cut.shape, dtype=cut.dtype, device=buffer.device)
            for region, window in zip(cut.regions, windows, strict=True):
                whole[region.slices].copy_(window.of(buffer))
            wholes.append(whole)
        return tuple(wholes)


def _windows(cuts: Sequence[Cut], rank: int, start: int) -> tuple[tuple[Window, ...], int]:
    """The windows of a rank's parts, from ``start`` on, and where they end."""
    windows = []
    for cut in cuts:
        region = cut.regions[rank]
        windows.append(Window(start, region.sizes, cut.dtype))
        start += math.ceil(region.num_elements * cut.dtype.itemsize / ALIGNMENT) * ALIGNMENT
    return tuple(windows), start
