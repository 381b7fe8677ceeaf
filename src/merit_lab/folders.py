"""The folders that commands write into."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def refuse_file(folder: Path) -> None:
    """Raise NotADirectoryError if a file is in the place of a folder to write into, or of one above it."""
    there = _nearest(folder)
    if there is not None and not there.is_dir():
        purpose = "" if there == folder else f" for {folder}"
        raise NotADirectoryError(
            f"{there} is a file, but a folder is needed{purpose}; name another folder, or move the file away"
        )


def check_writable(folder: Path) -> None:
    """Raise OSError if nothing can be written into a folder that may be yet to make: before long work."""
    refuse_file(folder)
    with writing_into(folder), tempfile.TemporaryFile(dir=_nearest(folder), buffering=0) as file:
        file.write(b"x")  # a full disk has room for an empty file


@contextlib.contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Say of a write that fails in which folder it did, and the way out."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"nothing can be written to {folder} ({error.strerror}); choose another folder, or fix the cause"
        ) from None


def _nearest(path: Path) -> Path | None:
    """Return the path, or the nearest above it that exists."""
    # Not Path.exists, which raises an error of its own where a name is too long.
    return next((above for above in (path, *path.parents) if os.path.exists(above)), None)  # noqa: PTH110
