"""Files that are whole or not there, whatever happens to the process or the machine."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part.

    Of several writers the last one to be done wins.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under: it takes the place of ``path`` if all goes well, and else is removed."""
    # A name of its own for each writer. Not tempfile's: others could not read the file.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last: a rename is safe from a power cut only after this."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
