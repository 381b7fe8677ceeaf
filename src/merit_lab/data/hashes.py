"""The hashes of the pieces of a corpus, on disk: there may be more than fit into memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator

_BLOCK = 1 << 16  # bytes read at a time
_ITEM = array("Q").itemsize


class Hashes:
    """64-bit integers in a temporary file that can be iterated over repeatedly."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as this object)
        weakref.finalize(self, self._file.close)
        self._length = 0
        self.smallest = 2**64 - 1
        self.largest = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        """Add a hash at the end."""
        self._file.write(array("Q", [value]).tobytes())
        self._length += 1
        self.smallest = min(self.smallest, value)
        self.largest = max(self.largest, value)

    def __iter__(self) -> Iterator[int]:
        self._file.flush()
        # pread, so that concurrent iterations do not interfere.
        for begin in range(0, self._length * _ITEM, _BLOCK):
            yield from array("Q", os.pread(self._file.fileno(), _BLOCK, begin))
