"""SIGTERM and SIGINT ask the loop to stop at the end of its step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_ASKING = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """A signal ended the run; it can be resumed."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """The signal that asked to stop; 0 while none has."""

    def __init__(self) -> None:
        self.signum = 0

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt  # pressed twice: at once, without a checkpoint
        self.signum = signum


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Take the signals while inside; afterwards they do what they did before.

    One that came too late, while the run ended by itself, is then the caller's: it does what it would
    have done, so that several runs in a row are not carried on against it.
    """
    request = StopRequest()
    before = {asking: signal.signal(asking, request._handle) for asking in _ASKING}
    try:
        yield request
    finally:
        for asking, handler in before.items():
            signal.signal(asking, handler)
    if request.signum:
        signal.raise_signal(request.signum)
