"""Report measurements to the journal and the display; a no-op on all ranks but the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from merit_lab.runs import Journal
from merit_lab.train.display import Display
from merit_lab.train.parallel import Ranks
from merit_lab.train.start import Start


class Reporter:
    """Records measurements and shows them."""

    def __init__(self, journal: Journal | None, display: Display | None) -> None:
        self._journal, self._display = journal, display

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Report one measurement; record/metrics.py lists the kinds."""
        if self._journal is not None and self._display is not None:
            self._journal.write(kind, step, **values)
            self._display.show(kind, step, values)

    def event(self, step: int, what: str, message: str) -> None:
        """Report an event."""
        self.write("event", step, what=what, message=message)

    def sync(self) -> tuple[int, str]:
        """Flush to disk and return the length and the hash of the metrics file. Only for the first rank."""
        assert self._journal is not None
        offset = self._journal.sync()
        return offset, self._journal.digest(offset)


@contextlib.contextmanager
def reporting(start: Start, ranks: Ranks) -> Iterator[Reporter]:
    """Open the reporter of a run that starts or resumes."""
    with contextlib.ExitStack() as stack:

        def open_journal() -> None:
            journal = Journal(
                start.run,
                offset=start.metrics_offset,
                digest=start.metrics_sha256,
                step=start.step + 1,
                wandb=start.config.measure.wandb,
            )
            stack.enter_context(journal)
            assert start.config.steps is not None
            display = stack.enter_context(Display(start.config.steps, start.step))
            opened.append(Reporter(journal, display))

        opened: list[Reporter] = []
        ranks.first(open_journal)
        yield opened[0] if opened else Reporter(None, None)
