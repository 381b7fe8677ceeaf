"""SIGTERM, SIGINT and SIGHUP stop the training loop at the end of its step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def _signals() -> tuple[signal.Signals, ...]:
    """The signals to handle. SIGHUP, of a lost terminal, only if ``nohup`` does not ignore it."""
    always = (signal.SIGTERM, signal.SIGINT)
    return always if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*always, signal.SIGHUP)


class Interrupted(Exception):
    """Raised when a signal ended the run; it can be resumed."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequest:
    """The signal that requested a stop; 0 if there was none."""

    def __init__(self) -> None:
        self.signum = 0

    def interrupted(self, remark: str = "") -> Interrupted:
        """Return the exception for the signal, with a remark in its message."""
        return Interrupted(self.signum, f"stopped by {signal.Signals(self.signum).name}{remark}")

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        if self.signum == signal.SIGINT == signum:
            raise KeyboardInterrupt  # Ctrl-C pressed twice: stop at once, without a checkpoint
        self.signum = signum


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Handle the signals inside the context, and restore the previous handlers afterwards.

    A signal that arrived too late to stop the run is raised again for the caller, so that a program that
    trains several runs does not continue with the next one.
    """
    request = StopRequest()
    before = {signum: signal.signal(signum, request._handle) for signum in _signals()}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if request.signum:
        signal.raise_signal(request.signum)
