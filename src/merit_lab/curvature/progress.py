"""Progress of a measurement: a bar in a terminal, a line for each part elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar


class WorkProgress:
    """Counts the units of work of each part."""

    def __init__(self, unit: str, console: Console | None = None) -> None:
        self._unit = unit
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._done = 0

    @contextmanager
    def part(self, name: str, total: int | None) -> Iterator[None]:
        """Show a part while the context lasts; ``total`` is None if unknown."""
        self._done, began = 0, time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn(self._unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            with Bar(*columns, console=self._console, transient=True) as self._bar:
                self._task = self._bar.add_task(name, total=total)
                yield
            self._bar = None
        else:
            yield
        if self._done:
            seconds = time.monotonic() - began
            self._console.print(f"{name}: {self._done} {self._unit} in {seconds:.1f} s", markup=False)

    def advance(self) -> None:
        """Count one unit as done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
