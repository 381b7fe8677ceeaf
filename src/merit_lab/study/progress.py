"""How far all runs are, while several are worked on: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from merit_lab.models.source import work_per_token
from merit_lab.study.trial import Trial
from merit_lab.study.workers import is_done, last_step, progress

_SECONDS_BETWEEN_LINES = 20.0
_MOST_SHOWN = 8


class Progress:
    """Shows the share of all work that is done, what is worked on, and the time that is left.

    Args:
        runs: all runs, also those that were done before.
        console: where to write.
    """

    def __init__(self, runs: Sequence[Trial], console: Console) -> None:
        self._console = console
        self._left = [own for own in runs if not is_done(own.folder)]
        self._num_runs = len(runs)
        self._began = time.monotonic()
        self._to_do = sum(_cost(own) for own in self._left)
        self._done_before = sum(_cost(own) * _share(own, last_step(own)[0]) for own in self._left)
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
        """Look at the run directories and show how far they are."""
        if self._live is not None:
            self._live.update(self._picture())
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.print(self._picture(), soft_wrap=True)

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        lines = []
        under_way = 0.0
        for own in list(self._left):
            if is_done(own.folder):
                self._left.remove(own)
                self._finished += _cost(own)
            elif (seen := progress(own)) is not None:
                step, loss = seen
                under_way += _cost(own) * _share(own, step)
                lines.append(Text(f"  {own.folder.name}  step {step}/{own.config.steps}  loss {loss:.3f}"))
        done = self._finished + under_way - self._done_before
        words = f"{self._num_runs - len(self._left)} of {self._num_runs} runs"
        if done > 0:
            left = self._to_do - self._done_before - done
            seconds = (time.monotonic() - self._began) * left / done
            words += f", about {max(1, round(seconds / 60))} min left"
        return Group(Text(words, style="bold"), *lines[:_MOST_SHOWN])


def _cost(run: Trial) -> float:
    config = run.config
    tokens = config.batch * config.model.context * (config.steps or 0)
    return float(work_per_token(config.model) * tokens)


def _share(run: Trial, step: int) -> float:
    return step / (run.config.steps or 1)
