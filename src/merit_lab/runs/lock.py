"""Lock a run directory, or a folder of results in it, for one process at a time.

The lock is the kernel's (flock), so it ends with its process in any case: the `lock` file of a dead process
locks nothing. The file's text only says who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from merit_lab.folders import refuse_file, writing_into

_PATIENCE = 0.5  # seconds; a process that only checks the status holds the lock for an instant
_BEGINS = b"process "
_NO_OTHER_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link's target; no waiting for a pipe's end


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
    path = folder / "lock"
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise _not_a_lock(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_OTHER_FILE, 0o666)
    try:
        text = _text(descriptor, path)
        if not _acquire(descriptor, patience):
            holder = text.decode(errors="replace").strip() or "another process"
            raise RunInUse(f"{folder} is in use by {holder}. Wait for it, stop it, or choose another folder.")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with writing_into(folder):
            line = f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, line, 0))
        yield
    finally:
        os.close(descriptor)  # ends the lock


def is_locked(folder: Path) -> bool:
    """Whether a process holds the run directory now."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | _NO_OTHER_FILE)
    except OSError:  # never locked; or a link, which locks nothing
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _text(descriptor: int, path: Path) -> bytes:
    """What the file says. Raise ValueError if it is another's file, which must not be written over."""
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
        text = os.pread(descriptor, 512, 0)
        if not text or text.startswith(_BEGINS):
            return text
    raise _not_a_lock(path)


def _not_a_lock(path: Path) -> ValueError:
    return ValueError(
        f"{path} is a link, or a file that no run wrote, and would be written over: remove it, or choose "
        "another folder"
    )


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
