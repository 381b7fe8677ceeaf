"""Progress of long work: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class WorkProgress:
    """Shows how far each piece of work is, one piece after the other.

    Args:
        console: where to write; by default the current standard error, even if it is redirected later.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._name, self._unit = "", ""
        self._total: float | None = None
        self._done = 0.0

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)

    @contextmanager
    def piece(self, name: str, total: float | None, unit: str) -> Iterator[None]:
        """Show a piece of work while the context lasts; ``total`` is None if it is unknown."""
        self.begin(name, total, unit)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str, total: float | None, unit: str) -> None:
        """Show another piece of work."""
        self.end()
        self._name, self._total, self._unit, self._done = name, total, unit, 0.0
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(
                *columns, console=self._console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task(name, total=total, state=self._state())
            self._bar.start()

    def advance(self, num: float = 1) -> None:
        """Count some units as done."""
        self.update(self._done + num)

    def update(self, done: float, note: str = "") -> None:
        """Show that this many units are done, and a note behind them."""
        self._done = done if self._total is None else min(done, self._total)
        state = f"{self._state()}, {note}" if note else self._state()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, state=state)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{self._name}: {state}")

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _state(self) -> str:
        if not self._total:
            return f"{self._done:,.0f} {self._unit}"
        return f"{self._done / self._total:.0%} of {self._total:,.0f} {self._unit}"
