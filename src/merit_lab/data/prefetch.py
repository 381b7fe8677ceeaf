"""Load the next micro-batches in a thread while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from merit_lab.data.batches import Batches

_Pair = tuple[Tensor, Tensor]


class Prefetcher:
    """Yields (inputs, targets) on a device: the micro-batches of one rank, step by step.

    A thread keeps up to ``depth`` of them ready, in pinned memory if the device is a CUDA GPU, so that the
    host does not wait for the copy. Errors in the thread are raised by ``next``. Use it in a ``with``
    statement, or call ``close``.

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
        sequences = torch.from_numpy(self._batches.sequences(step, begin, end))
        inputs, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        if self._device.type == "cuda":
            # A new thread starts on device 0; pinning there would create a context on it for every rank.
            torch.cuda.set_device(self._device)
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets
