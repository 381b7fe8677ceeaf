"""A pseudorandom permutation of 0 to n - 1 that is computed from a key and never stored.

A Feistel network on pairs (left, right) of numbers below ceil(sqrt(n)): each round adds a hash of one half to
the other, which is invertible for any hash, so the whole is a permutation. A result that is not below n is
encrypted again until it is (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). There are few
such results, as the square is at most 2 sqrt(n) larger than n.

A shuffled array would not do: numpy may change the order of a seed between versions, so that a resumed run
would see other batches, and nine billion tokens would need an array of 9 million entries.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

_Unsigned = NDArray[np.uint64]


class Order:
    """The permutation of ``range(length)`` for a key."""

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
