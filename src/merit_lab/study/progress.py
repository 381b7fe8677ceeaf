"""Progress of runs that are trained at the same time: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from merit_lab.models.source import work_per_token
from merit_lab.study.state import is_done, last_step, progress
from merit_lab.study.trial import Trial

_SECONDS_BETWEEN_LINES = 20.0
_MOST_SHOWN = 8


class StudyProgress:
    """Show how many runs are done, the runs in progress, and the remaining time.

    Args:
        runs: all runs, including those that are already done.
        console: where to write.
    """

    def __init__(self, runs: Sequence[Trial], console: Console) -> None:
        self._console = console
        self._left = [run for run in runs if not is_done(run.folder)]
        self._num_runs = len(runs)
        self._first_seen: tuple[float, float] | None = (
            None  # when steps were first seen, and how much was done
        )
        self._to_do = sum(_cost(run) for run in self._left)
        self._done_before = sum(_cost(run) * _share(run, last_step(run)[0]) for run in self._left)
        self._finished = 0.0
        self._last_line = time.monotonic()
        self._live = Live(console=console, refresh_per_second=2) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Read the run directories and show their progress."""
        picture = self._picture()  # also where it is not shown: the time left counts from the first steps
        if self._live is not None:
            self._live.update(picture)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.print(picture, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        lines = []
        in_progress = 0.0
        for run in list(self._left):
            if is_done(run.folder):
                self._left.remove(run)
                self._finished += _cost(run)
            elif (latest := progress(run)) is not None:
                step, loss = latest
                in_progress += _cost(run) * _share(run, step)
                at = "starting" if loss is None else f"step {step}/{run.config.steps}  loss {loss:.3f}"
                lines.append(Text(f"  {run.folder.name}  {at}"))
        done = self._finished + in_progress - self._done_before
        text = f"{self._num_runs - len(self._left)} of {self._num_runs} runs"
        if done > 0 and self._left:
            # Not from the beginning: a worker takes half a minute to start, and then a step takes an instant.
            now = time.monotonic()
            began, done_then = self._first_seen = self._first_seen or (now, done)
            if done > done_then:
                left = self._to_do - self._done_before - done
                seconds = (now - began) * left / (done - done_then)
                text += f", about {max(1, round(seconds / 60))} min left"
        return Group(Text(text, style="bold"), *lines[:_MOST_SHOWN])


def _cost(run: Trial) -> float:
    config = run.config
    tokens = config.batch * config.model.context * (config.steps or 0)
    return float(work_per_token(config.model) * tokens)


def _share(run: Trial, step: int) -> float:
    return step / (run.config.steps or 1)
