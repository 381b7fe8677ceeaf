"""Output of `merit evaluate`: a bar in a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from merit_lab.record import EvaluationResult, Metric

_SECONDS_BETWEEN_LINES = 10.0


class EvaluationDisplay:
    """Shows the progress of an evaluation.

    Args:
        console: where to write; by default the current standard error, which is redirected later for lm-eval.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._name, self._total, self._done = "", 0, 0

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)

    def begin(self, name: str, num_sequences: int) -> None:
        """Start the bar of a set with this many sequences."""
        self.end()
        self._name, self._total, self._done = name, num_sequences, 0
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(
                *columns,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(name, total=num_sequences)
            self._bar.start()

    def advance(self, num_sequences: int) -> None:
        """Count sequences as done."""
        self._done = min(self._done + num_sequences, self._total)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{self._name}: {self._done / self._total:.0%} of {self._total:,} sequences")

    def end(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def print_results(results: Iterable[EvaluationResult], console: Console) -> None:
    """Print a table with a row for each metric of each set."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Set")
    table.add_column("Items", justify="right")
    table.add_column("Measure")
    table.add_column("Value", justify="right")
    table.add_column("Error", justify="right")
    for result in results:
        first = (result.name, f"{result.num_items:,}")
        for name, metric in result.metrics.items():
            table.add_row(*first, name, *_numbers(metric))
            first = ("", "")
    console.print(table)


def _numbers(metric: Metric) -> tuple[str, str]:
    error = "" if metric.stderr is None else f"{metric.stderr:.2g}"
    return f"{metric.value:.4g}", error
