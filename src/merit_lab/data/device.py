"""Micro-batches on a device, gathered there from a copy of all tokens, or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from merit_lab.data.batches import Batches

_AHEAD = 1 << 13  # starts of sequences that are computed and copied at a time


def micro_batches(
    batches: Batches, device: torch.device, *, steps: range, rows: Sequence[tuple[int, int]], keep: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of some steps on a device: the sequences of `Batches`, bit for bit.

    Nothing waits for the device.

    Args:
        batches: the sequences.
        device: where they go.
        steps: the steps, in order.
        rows: (begin, end) of each micro-batch in the batch of a step.
        keep: gather the sequences from a copy of all tokens there (see `TokenFile.on`), and let the host only
            compute where those of many steps start. Otherwise, for files that do not fit, the host gathers
            them and copies them over.
    """
    for sequences in (_gathered_there if keep else _gathered_here)(batches, device, steps, rows):
        yield sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def _gathered_there(
    batches: Batches, device: torch.device, steps: range, rows: Sequence[tuple[int, int]]
) -> Iterator[Tensor]:
    tokens = batches.tokens.on(device)
    unsigned = (1 << 8 * tokens.element_size()) - 1  # they are kept as signed integers of their size
    offsets = torch.arange(batches.context + 1, device=device)
    at_a_time = max(1, _AHEAD // batches.batch)
    for first in steps[::at_a_time]:
        last = min(first + at_a_time, steps.stop)
        numbers = np.arange(first * batches.batch, last * batches.batch, dtype=np.int64)
        starts = _sent(torch.from_numpy(batches.starts(numbers)), device)
        for of_step in starts.split(batches.batch):
            for begin, end in rows:
                yield tokens[of_step[begin:end, None] + offsets].long() & unsigned


def _gathered_here(
    batches: Batches, device: torch.device, steps: range, rows: Sequence[tuple[int, int]]
) -> Iterator[Tensor]:
    for step in steps:
        for begin, end in rows:
            yield _sent(torch.from_numpy(batches.sequences(step, begin, end)), device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, without waiting for it."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)
