"""Progress of `merit prepare`: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as _RichProgress

from merit_lab.data.parts import Counts

_SECONDS_BETWEEN_LINES = 10.0


class PrepareProgress:
    """Shows messages and progress."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(quiet=quiet, highlight=False, soft_wrap=True)
        self._bar: _RichProgress | None = None
        self._last_line = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)

    def count(self, num_bytes: int) -> None:
        """Print from time to time how much text was read, while the total is unknown."""
        if time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"reading: {num_bytes:,} bytes of text so far")

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[None]:
        """Show progress towards ``total`` bytes or documents while the context lasts."""
        self._total, self._unit = total, unit
        self._started: tuple[float, int] | None = None
        self._last_line = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        columns = (
            TextColumn("tokenizing"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with _RichProgress(*columns, console=self._console) as self._bar:
            self._task: TaskID = self._bar.add_task("", total=total)
            yield
        self._bar = None

    def show(self, counts: Mapping[str, Counts]) -> None:
        """Show what has been done so far, including earlier calls."""
        name = "num_text_bytes" if self._unit == "bytes" else "num_documents"
        done = sum(getattr(count, name) for count in counts.values())
        num_tokens = sum(count.num_tokens for count in counts.values())
        now = time.monotonic()
        if self._started is None:
            self._started = now, num_tokens
        seconds, tokens_before = now - self._started[0], self._started[1]
        message = f"{num_tokens:,} tokens"
        if seconds > 0 and num_tokens > tokens_before:
            message += f", {(num_tokens - tokens_before) / seconds:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=message)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(f"{done / self._total:.1%} of {self._total:,} {self._unit}: {message}")
