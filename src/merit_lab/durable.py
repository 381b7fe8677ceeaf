"""Atomic, durable writes of files."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part.

    Of several writers the last one to finish wins.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success and is removed on failure."""
    # A unique name for each writer. Not tempfile's: other users could not read the file.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        # A write to a full disk names no file, and nobody knows the temporary one.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(partial)):
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder: a rename survives a power cut only after this."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
