"""Micro-batches on a device, gathered there from a copy of all tokens, or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from merit_lab.data.batches import Batches

_AHEAD = 1 << 13  # starts of sequences that are computed and copied at a time


class DeviceBatches:
    """The sequences of a `Batches` on a device, bit for bit.

    Nothing waits for the device. With ``keep`` the sequences are gathered there from a copy of all tokens,
    made once for a file and a device (see `TokenFile.on`); the host computes where those of many steps start.
    Without, for files that do not fit, the host gathers them and copies them over.
    """

    def __init__(self, batches: Batches, device: torch.device | str, *, keep: bool = True) -> None:
        self._batches = batches
        self._device = torch.empty(0, device=device).device  # adds the index of the current GPU to "cuda"
        self._tokens = batches.tokens.on(self._device) if keep else None
        self._offsets = torch.arange(batches.context + 1, device=self._device)
        self._num_steps = max(1, _AHEAD // batches.batch)
        self._first, self._starts = -1, torch.empty(0)

    def sequences(self, step: int, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows ``begin`` to ``end`` of a step's batch: int64, (end - begin, context + 1)."""
        if self._tokens is None:
            return self._sent(torch.from_numpy(self._batches.sequences(step, begin, end)))
        end = self._batches.check_rows(step, begin, end)
        places = self._starts_of(step)[begin:end, None] + self._offsets
        # The tokens are kept as signed integers of their size, which every device can index.
        return self._tokens[places].long() & (1 << 8 * self._tokens.element_size()) - 1

    def micro_batches(
        self, *, rows: Sequence[tuple[int, int]], first_step: int, num_steps: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets) of one rank, step by step; ``rows`` is (begin, end) of each micro-batch."""
        for step in range(first_step, first_step + num_steps):
            for begin, end in rows:
                sequences = self.sequences(step, begin, end)
                yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def _starts_of(self, step: int) -> Tensor:
        first = step - step % self._num_steps
        if first != self._first:
            batch = self._batches.batch
            rows = np.arange(first * batch, (first + self._num_steps) * batch, dtype=np.int64)
            starts = torch.from_numpy(self._batches.starts(rows)).view(self._num_steps, batch)
            self._first, self._starts = first, self._sent(starts)
        return self._starts[step - first]

    def _sent(self, values: Tensor) -> Tensor:
        """Return values on the device, without waiting for it."""
        if self._device.type == "cuda":
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)
