"""Progress of `merit prepare`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from merit_lab.data.parts import Counts
from merit_lab.progress import WorkProgress


class PrepareProgress(WorkProgress):
    """Shows on the standard output how much text has been read and tokenized."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(console or Console(quiet=quiet, highlight=False, soft_wrap=True))

    @contextmanager
    def bar(self, total: int, unit: str) -> Iterator[None]:
        """Show progress towards ``total`` bytes or documents while the context lasts."""
        self._counted = "num_text_bytes" if unit == "bytes" else "num_documents"
        self._started: tuple[float, int] | None = None
        with self.piece("tokenizing", total, unit):
            yield

    def show(self, counts: Mapping[str, Counts]) -> None:
        """Show what has been done so far, including earlier calls."""
        num_tokens, now = sum(count.num_tokens for count in counts.values()), time.monotonic()
        self._started = began, tokens_before = self._started or (now, num_tokens)
        message = f"{num_tokens:,} tokens"
        if now > began and num_tokens > tokens_before:
            message += f", {(num_tokens - tokens_before) / (now - began):,.0f} tokens/s"
        self.update(sum(getattr(count, self._counted) for count in counts.values()), message)
