"""Progress of a run: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from merit_lab.runs import keep_nan

_SECONDS_BETWEEN_LINES = 10.0
_ALL_NUMBERS = 74  # the usual width of all numbers
_LEAST_BAR, _MOST_BAR = 8, 24


class Display:
    """Shows measurements as they are recorded.

    Args:
        steps: length of the run.
        first: the step at which it starts.
        console: where to write; by default standard error.
    """

    def __init__(self, steps: int, first: int = 0, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console(stderr=True, highlight=False)
        self._seen: dict[str, float] = {}
        self._began: tuple[float, int] | None = None  # when the first step was done, and which it was
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._last_step = first
        self._progress: Progress | None = None
        if self._console.is_terminal:
            # What steps and remaining time leave: rich would cut them first.
            self._room = self._console.width - len(f"{steps}/{steps}  0:00:00  ")
            bars = []
            if (width := min(self._room - _ALL_NUMBERS, _MOST_BAR)) >= _LEAST_BAR:
                bars.append(BarColumn(bar_width=width))
                self._room -= width
            self._progress = Progress(
                MofNCompleteColumn(),
                *bars,
                TextColumn("{task.description}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._progress.add_task("starting", total=steps, completed=first)

    def show(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Show a measurement; the arguments are those of ``Journal.write``."""
        if kind == "event":
            if values["what"] == "finished" and self._progress is None and self._last_step < step:
                self._line(step)  # unless a validation after the last step already showed it
            self._console.print(f"step {step}: {values['message']}", markup=False, soft_wrap=True)
        elif kind == "attention":
            self._seen["logit"] = keep_nan(max, [value for heads in values["max_logits"] for value in heads])
            if values["entropy"] is not None:
                self._seen["entropy"] = statistics.fmean(
                    value for heads in values["entropy"] for value in heads
                )
        elif kind == "validation":
            self._seen["validation"] = values["loss"]
            if self._progress is None:
                self._line(step)
            else:
                self._progress.update(self._task, description=self._text())
        elif kind == "train":
            self._seen["loss"], self._seen["tokens/s"] = values["loss"], values["tokens_per_second"]
            # Not from the beginning: to start takes long, and so does the first step where it is compiled.
            self._began = self._began or (time.monotonic(), step)
            if self._progress is not None:
                self._progress.update(self._task, completed=step, description=self._text())
            elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
                self._line(step)

    def _line(self, step: int) -> None:
        self._last_line, self._last_step = time.monotonic(), step
        left = ""
        if self._began is not None and step > self._began[1]:
            began, first = self._began
            a_step = (time.monotonic() - began) / (step - first)
            left = f"  {_duration(a_step * (self._steps - step))} left"
        self._console.print(f"step {step}/{self._steps}  {self._text()}{left}", markup=False, soft_wrap=True)

    def _text(self) -> str:
        shown = {
            "loss": "{:.4f}",
            "validation": "{:.4f}",
            "logit": "{:.1f}",
            "entropy": "{:.1f}",
            "tokens/s": "{:,.0f}",
        }
        numbers = [
            f"{name} {style.format(self._seen[name])}" for name, style in shown.items() if name in self._seen
        ]
        while numbers and self._progress is not None and len("  ".join(numbers)) > self._room:
            numbers.pop()
        return "  ".join(numbers)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
