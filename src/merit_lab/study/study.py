"""What a study is, and how it is conducted: round by round, until it asks for no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from merit_lab.study.progress import Progress
from merit_lab.study.runner import carry_out, check_optimizers
from merit_lab.study.trial import Trial
from merit_lab.study.workers import Workers, is_done, one_thread
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import listening


@dataclass(frozen=True)
class Round:
    """Trials that a study asks for at the same time, and what to say before them."""

    trials: Sequence[Trial]
    title: str = ""


class Study(Protocol):
    """A question that training runs answer.

    What comes next follows from the run directories alone: so a study that was stopped goes on, and several
    processes may work on one.
    """

    @property
    def folder(self) -> Path:
        """Its runs are folders in here."""

    def next(self) -> Round | None:
        """The trials that are needed by now, with those that are done; None when nothing is missing."""


def conduct(study: Study, ranks: Ranks, jobs: int = 1) -> None:
    """Carry out a study, so many trials at a time. When a signal stops it, the same call goes on.

    No trial is begun twice: one that another process is at is left to it.
    """
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    begun: set[Path] = set()
    while (asked := ranks.first(study.next)) is not None:
        trials = [own for own in asked.trials if own.folder not in begun]
        if not trials:
            return
        if asked.title:
            console.print(asked.title, style="bold", markup=False, soft_wrap=True)
        if jobs > 1 and ranks.size == 1:
            _side_by_side(trials, jobs, study.folder / "logs", console)
        else:
            carry_out(trials, ranks)
        begun.update(own.folder for own in trials)


def _side_by_side(trials: Sequence[Trial], jobs: int, logs: Path, console: Console) -> None:
    left = [own for own in trials if not is_done(own.folder)]
    if not left:
        return
    check_optimizers(left)
    with (
        one_thread(),
        listening() as stop,
        Workers(left, min(jobs, len(left)), logs) as workers,
        Progress(trials, console) as progress,
    ):
        for _ in workers.waiting(left, stop):
            progress.show()
        progress.show()
