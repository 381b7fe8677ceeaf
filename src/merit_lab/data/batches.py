"""The tokens that a step trains on: a pure function of file, context, batch, seed and step."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from merit_lab.checks import check_at_least, check_size
from merit_lab.data.order import Order
from merit_lab.data.tokens import TokenFile


class Batches:
    """Sequences of a token file, without replacement within an epoch, each epoch in another order.

    An epoch cuts the file into windows of ``context`` tokens. The first token is drawn for each epoch, so
    that the cuts differ; up to two windows at the ends are left out. A sequence is a window and the token
    after it, the target of its last one. Rows are numbered continuously over steps, so a batch may contain
    the end of one epoch and the beginning of the next.

    Nothing depends on ranks, micro-batches or earlier calls: a resumed run, on any number of ranks, sees the
    same tokens.

    Args:
        tokens: the file.
        context: tokens in a sequence, without the last target.
        batch: sequences in a step, over all ranks and micro-batches.
        seed: any integer; determines the order.
    """

    def __init__(self, tokens: TokenFile, *, context: int, batch: int, seed: int) -> None:
        check_size("context", context)
        check_size("batch", batch)
        windows = _num_windows(tokens, context)
        self.tokens = tokens
        self.context = context
        self.batch = batch
        self.seed = seed
        # One window fewer than fit, if possible, leaves room to shift the first token.
        self.num_windows = max(1, windows - 1)
        self._sequences = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens.tokens), context + 1)
        self._epoch = lru_cache(maxsize=4)(self._draw_epoch)

    def sequences(self, step: int, begin: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Return rows ``begin`` to ``end`` of a step's batch: int64, (end - begin, context + 1)."""
        end = self.batch if end is None else end
        if step < 0:
            raise ValueError(f"step is {step}; steps are counted from 0")
        if not 0 <= begin <= end <= self.batch:
            raise ValueError(f"begin is {begin} and end is {end}; a batch has rows 0 to {self.batch}")
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
        """Return the first token of an epoch's windows, and their order."""
        key = f"{self.seed} {epoch}"
        spare = self.tokens.num_tokens - 1 - self.num_windows * self.context
        drawn = int.from_bytes(hashlib.blake2b(f"first {key}".encode(), digest_size=8).digest(), "little")
        return drawn % (spare + 1), Order(self.num_windows, key)


def validation_sequences(tokens: TokenFile, context: int, limit: int) -> NDArray[np.int64]:
    """Return sequences for validation, always the same: int64, (n, context + 1), n at most ``limit``.

    They do not overlap and are spread evenly over the file.
    """
    check_size("context", context)
    check_at_least("limit", limit, 1)
    windows = _num_windows(tokens, context)
    chosen = min(limit, windows)
    starts = np.arange(chosen, dtype=np.int64) * windows // chosen * context
    sequences = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens.tokens), context + 1)
    return sequences[starts].astype(np.int64)


def _num_windows(tokens: TokenFile, context: int) -> int:
    """Return how many windows with a token after each fit into a file. Raise ValueError if none does."""
    windows = (tokens.num_tokens - 1) // context
    if windows < 1:
        raise ValueError(
            f"{tokens.path} has {tokens.num_tokens} tokens; one sequence of context {context} needs "
            f"{context + 1}: use a shorter context, or prepare more text"
        )
    return windows
