"""Micro-batches on the device: gathered there from tokens kept there, or loaded ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from merit_lab.data.batches import Batches

_Pair = tuple[Tensor, Tensor]
_AHEAD = 1 << 13  # starts of sequences that are computed and copied at a time


class DeviceBatches:
    """The sequences of a `Batches`, bit for bit, gathered from a copy of all tokens on the device.

    The copy is made once for a file and a device, and shared: see `TokenFile.on`. Nothing waits for the
    device: the host computes where the sequences of many steps start, and copies the numbers at once.
    """

    def __init__(self, batches: Batches, device: torch.device | str) -> None:
        self._batches = batches
        self._tokens = batches.tokens.on(device)
        self._mask = (1 << 8 * self._tokens.element_size()) - 1
        self._offsets = torch.arange(batches.context + 1, device=self._tokens.device)
        self._num_steps = max(1, _AHEAD // batches.batch)
        self._first, self._starts = -1, torch.empty(0)

    def sequences(self, step: int, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows ``begin`` to ``end`` of a step's batch: int64, (end - begin, context + 1)."""
        end = self._batches.check_rows(step, begin, end)
        starts = self._starts_of(step)[begin:end]
        # The tokens are kept as signed integers of their size, which every device can index.
        return self._tokens[starts[:, None] + self._offsets].long() & self._mask

    def pair(self, step: int, begin: int = 0, end: int | None = None) -> _Pair:
        """Return inputs and targets of these rows, each contiguous: int64, (end - begin, context)."""
        return _pair(self.sequences(step, begin, end))

    def micro_batches(
        self, *, rows: Sequence[tuple[int, int]], first_step: int, num_steps: int
    ) -> Iterator[_Pair]:
        """Yield what a `Prefetcher` with the same arguments yields."""
        for step in range(first_step, first_step + num_steps):
            for begin, end in rows:
                yield self.pair(step, begin, end)

    def _starts_of(self, step: int) -> Tensor:
        first = step - step % self._num_steps
        if first != self._first:
            batch = self._batches.batch
            numbers = np.arange(first * batch, (first + self._num_steps) * batch, dtype=np.int64)
            starts = torch.from_numpy(self._batches.starts(numbers)).view(self._num_steps, batch)
            self._first, self._starts = first, _sent(starts, self._tokens.device)
        return self._starts[step - first]


class Prefetcher:
    """Yields (inputs, targets) on a device: the micro-batches of one rank, step by step.

    For token files that do not fit onto the device. A thread keeps up to ``depth`` micro-batches ready, in
    pinned memory if the device is a CUDA GPU, so that the host does not wait for the copy. Errors in the
    thread are raised by ``next``. Use it in a ``with`` statement, or call ``close``.

    Args:
        batches: where the sequences come from.
        device: where the tensors go.
        rows: this rank's part of a batch, as (begin, end) for each micro-batch.
        first_step: the first step.
        num_steps: how many steps to yield.
        depth: micro-batches kept ready.
    """

    def __init__(
        self,
        batches: Batches,
        *,
        device: torch.device | str,
        rows: Sequence[tuple[int, int]],
        first_step: int,
        num_steps: int,
        depth: int = 4,
    ) -> None:
        self._batches = batches
        self._device = torch.empty(0, device=device).device  # adds the index of the current GPU to "cuda"
        self._wanted: Iterator[tuple[int, int, int]] = (
            (step, begin, end) for step in range(first_step, first_step + num_steps) for begin, end in rows
        )
        self._ready: deque[Future[_Pair]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        for _ in range(depth):
            self._order_next()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> _Pair:
        if not self._ready:
            raise StopIteration
        try:
            inputs, targets = self._ready.popleft().result()
        except BaseException:
            self.close()
            raise
        self._order_next()
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Stop the thread; nothing more is yielded."""
        self._ready.clear()
        self._wanted = iter(())
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _order_next(self) -> None:
        for step, begin, end in self._wanted:
            self._ready.append(self._thread.submit(self._make, step, begin, end))
            return

    def _make(self, step: int, begin: int, end: int) -> _Pair:
        inputs, targets = _pair(torch.from_numpy(self._batches.sequences(step, begin, end)))
        if self._device.type == "cuda":
            # A new thread starts on device 0; pinning there would create a context on it for every rank.
            torch.cuda.set_device(self._device)
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


def _pair(sequences: Tensor) -> _Pair:
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
