"""Which tokens a step trains on: a pure function of file, context, batch, seed and step."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from merit_lab.data.order import Order
from merit_lab.data.tokens import TokenFile


class Batches:
    """Sequences of a token file, without replacement within an epoch, each epoch in another order.

    An epoch cuts the file into windows of ``context`` tokens, from a first token that is drawn for each
    epoch, so that the cuts fall elsewhere the next time; up to two windows at the ends are left out. A
    sequence is a window and the token after it, the target of its last one. Rows are numbered through
    from step to step, hence a batch may hold the end of one epoch and the beginning of the next.

    Nothing depends on ranks, micro-batches or earlier calls: a run that is resumed, on any number of
    ranks, sees the tokens it would have seen.

    Args:
        tokens: the file.
        context: tokens in a sequence, without the last target.
        batch: sequences in a step, over all ranks and micro-batches.
        seed: any whole number; decides the order.
    """

    def __init__(self, tokens: TokenFile, *, context: int, batch: int, seed: int) -> None:
        _check_count("context", context)
        _check_count("batch", batch)
        windows = _num_windows(tokens, context)
        self.tokens = tokens
        self.context = context
        self.batch = batch
        self.seed = seed
        # One window fewer than fit, if that leaves any, gives the first token room to move.
        self.num_windows = max(1, windows - 1)
        self._sequences = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens.tokens), context + 1)
        self._epoch = lru_cache(maxsize=4)(self._draw_epoch)

    def sequences(self, step: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Rows ``begin`` to ``end`` of a step's batch: int64, (end - begin, context + 1)."""
        end = self.batch if end is None else end
        if step < 0:
            raise ValueError(f"step is {step}; steps are counted from 0")
        if not 0 <= begin <= end <= self.batch:
            raise ValueError(f"rows {begin} to {end} were asked for; a batch has the rows 0 to {self.batch}")
        return self._sequences[self._starts(step, begin, end)].astype(np.int64)

    def _starts(self, step: int, begin: int, end: int) -> NDArray[np.int64]:
        rows = step * self.batch + np.arange(begin, end, dtype=np.int64)
        epochs, positions = np.divmod(rows, self.num_windows)
        starts = np.empty_like(rows)
        for epoch in np.unique(epochs):
            first, order = self._epoch(int(epoch))
            inside = epochs == epoch
            starts[inside] = first + order(positions[inside]) * self.context
        return starts

    def _draw_epoch(self, epoch: int) -> tuple[int, Order]:
        """The first token of an epoch's windows, and the order in which they come."""
        key = f"{self.seed} {epoch}"
        spare = self.tokens.num_tokens - 1 - self.num_windows * self.context
        drawn = int.from_bytes(hashlib.blake2b(f"first {key}".encode(), digest_size=8).digest(), "little")
        return drawn % (spare + 1), Order(self.num_windows, key)


def validation_sequences(tokens: TokenFile, context: int, limit: int | None = None) -> NDArray[np.int64]:
    """Sequences to validate on, always the same: int64, (n, context + 1), n at most ``limit``.

    They do not overlap and are spread evenly over the file; without a limit they are all there are.
    """
    _check_count("context", context)
    windows = _num_windows(tokens, context)
    if limit is not None:
        _check_count("limit", limit)
    chosen = windows if limit is None else min(limit, windows)
    starts = np.arange(chosen, dtype=np.int64) * windows // chosen * context
    sequences = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens.tokens), context + 1)
    return sequences[starts].astype(np.int64)


def _num_windows(tokens: TokenFile, context: int) -> int:
    """How many windows with a token after each fit into a file: at least one."""
    windows = (tokens.num_tokens - 1) // context
    if windows < 1:
        raise ValueError(
            f"{tokens.path} has {tokens.num_tokens} tokens; one sequence of context {context} needs "
            f"{context + 1}: use a shorter context, or prepare more text"
        )
    return windows


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
