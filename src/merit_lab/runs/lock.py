"""Lock a run directory, or a folder of results in it, for one process at a time.

The lock is the kernel's (flock), so it ends with its process in any case: the `lock` file of a dead process
locks nothing. The file's text only says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from merit_lab.folders import refuse_file, writing_into

_PATIENCE = 0.5  # seconds; a process that only checks the status holds the lock for an instant


class RunInUse(RuntimeError):
    """Raised if another process uses the run directory."""


@contextlib.contextmanager
def lock(folder: Path, *, patience: float = _PATIENCE) -> Iterator[None]:
    """Lock a folder, which is created if needed. Raise RunInUse, with the process, if it is locked.

    Args:
        folder: the folder; its file "lock" is locked.
        patience: seconds to wait for another process.
    """
    refuse_file(folder)
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+b", buffering=0)  # closing it has nothing left to write
    with file:
        if not _acquire(file.fileno(), patience):
            file.seek(0)
            holder = file.read().decode().strip() or "another process"
            raise RunInUse(f"{folder} is in use by {holder}. Wait for it, stop it, or choose another folder.")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with writing_into(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
        yield  # closing the file ends the lock


def is_locked(folder: Path) -> bool:
    """Whether a process holds the run directory now."""
    try:
        file = (folder / "lock").open(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return False
    with file:
        return not _try(file.fileno(), fcntl.LOCK_SH)


def _acquire(descriptor: int, patience: float) -> bool:
    give_up = time.monotonic() + patience
    while not _try(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
