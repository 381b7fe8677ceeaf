"""The tokens that a step trains on: a pure function of file, context, batch, seed and step."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from merit_lab.checks import check_at_least, check_size
from merit_lab.data.tokens import TokenFile

FEWEST_VALIDATION = 64  # sequences; the mean of fewer says little


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
        windows = num_windows(tokens, context)
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
        rows = step * self.batch + np.arange(begin, end, dtype=np.int64)
        return self._sequences[self.starts(rows)].astype(np.int64)

    def starts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token of each row, numbered continuously over steps."""
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
    windows = num_windows(tokens, context)
    chosen = min(limit, windows)
    starts = np.arange(chosen, dtype=np.int64) * windows // chosen * context
    sequences = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens.tokens), context + 1)
    return sequences[starts].astype(np.int64)


def check_validation_size(tokens: TokenFile, context: int) -> None:
    """Raise ValueError if a file holds fewer than 64 validation sequences of a context."""
    if (num := num_windows(tokens, context)) < FEWEST_VALIDATION:
        raise ValueError(
            f"{tokens.path} has {num} validation sequences of context {context}, fewer than "
            f"{FEWEST_VALIDATION}, and the loss on so few says little: prepare the data with a larger "
            "--validation, use a shorter context, or insist with --measure.few-validation"
        )


def num_windows(tokens: TokenFile, context: int) -> int:
    """Return how many windows with a token after each fit into a file. Raise ValueError if none does."""
    windows = (tokens.num_tokens - 1) // context
    if windows < 1:
        raise ValueError(
            f"{tokens.path} has {tokens.num_tokens} tokens; one sequence of context {context} needs "
            f"{context + 1}: use a shorter context, or prepare more text"
        )
    return windows


_Unsigned = NDArray[np.uint64]


class Order:
    """A pseudorandom permutation of ``range(length)`` that is computed from a key and never stored.

    A Feistel network on pairs (left, right) of numbers below ceil(sqrt(length)): each round adds a hash of
    one half to the other, which is invertible for any hash, so the whole is a permutation. A result that is
    not below the length is encrypted again until it is (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). There are few such results, as the square is at most 2 sqrt(length) larger.

    A shuffled array would not do: numpy may change the order of a seed between versions, so that a resumed
    run would see other batches, and nine billion tokens would need an array of 9 million entries.
    """

    def __init__(self, length: int, key: str) -> None:
        assert 1 <= length < 2**62, length
        self.length = length
        self._side = np.uint64(math.isqrt(length - 1) + 1)
        digest = hashlib.blake2b(key.encode()).digest()
        self._round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at some positions, as int64."""
        numbers = self._encrypt(positions.astype(np.uint64))
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._encrypt(numbers[outside])
        return numbers.astype(np.int64)

    def _encrypt(self, numbers: _Unsigned) -> _Unsigned:
        left, right = numbers // self._side, numbers % self._side
        for key in self._round_keys:
            left, right = right, (left + _mix(right ^ key)) % self._side
        return left * self._side + right


def _mix(values: _Unsigned) -> _Unsigned:
    """Mix 64 bits with the final steps of the generator SplitMix64; the result is below 2**63."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (values ^ (values >> np.uint64(31))) >> np.uint64(1)
