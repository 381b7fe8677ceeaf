"""What a study is, and how it is conducted: round by round, until it asks for no more."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from merit_lab.report.write import refuse_folder
from merit_lab.study.cost import estimate
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
    later: int = 0
    """How many more there may be after these, at most."""


class Findings(Protocol):
    """What a study found."""

    @property
    def summary(self) -> str:
        """The answer, in words."""

    @property
    def warnings(self) -> Sequence[str]:
        """What a reader must know before using it."""

    def show(self) -> None:
        """Print what a terminal has room for."""

    def write(self, folder: Path) -> Path:
        """Write its files into a folder, over earlier ones; return the page's path."""


class Asking(Protocol):
    """What asks for trials.

    What comes next follows from the run directories alone: so a study that was stopped goes on, and several
    processes may work on one.
    """

    @property
    def folder(self) -> Path:
        """Its runs are in here."""

    def next(self) -> Round | None:
        """The trials that are needed by now, with those that are done; None when nothing is missing."""


class Study(Asking, Protocol):
    """A question that training runs answer."""

    def findings(self) -> Findings:
        """The answer, from the run directories alone."""


@dataclass(frozen=True)
class Conclusion:
    """What a study came to, and where it is written."""

    summary: str
    warnings: Sequence[str]
    page: Path


def hold(study: Study, jobs: int = 1) -> Conclusion | None:
    """Carry out a study, so many trials at a time; print what it found and write it to ``folder``/report.

    What is done stays done: the same call goes on after an interruption. Under torchrun only the first rank
    reports; the others return None.
    """
    ranks = Ranks.join()
    report = study.folder / "report"
    ranks.first(partial(refuse_folder, report))  # now, not when all is trained
    if (words := ranks.first(partial(_expected, study))) and ranks.is_first:
        print(words, file=sys.stderr)
    conduct([study], ranks, jobs)
    if not ranks.is_first:
        return None
    findings = study.findings()
    page = findings.write(report)
    findings.show()
    return Conclusion(findings.summary, findings.warnings, page)


def _expected(study: Study) -> str:
    """What the first round will take."""
    asked = study.next()
    return "" if asked is None else estimate(asked.trials, asked.later)


A = TypeVar("A", bound=Asking)


def conduct(
    studies: Sequence[A], ranks: Ranks, jobs: int = 1, conclude: Callable[[A], str] = lambda _: ""
) -> None:
    """Carry out studies, so many trials at a time. When a signal stops it, the same call goes on.

    No trial is begun twice: one that another process is at is left to it.

    Args:
        studies: the studies, in the order in which they are wanted.
        ranks: the processes that train together.
        jobs: trials at the same time.
        conclude: called by the first rank when all trials of a study are done; what it returns is said.
    """
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    if jobs > 1 and ranks.size == 1:
        _side_by_side(studies, jobs, console, conclude)
        return
    for study in studies:
        begun: set[Path] = set()
        while new := _new(ranks.first(study.next), begun, console):
            carry_out(new, ranks)
        if words := ranks.first(partial(conclude, study)):
            console.print(words, markup=False, soft_wrap=True)


def _side_by_side(studies: Sequence[A], jobs: int, console: Console, conclude: Callable[[A], str]) -> None:
    """Several trials at a time, of all studies; each study is concluded when its own are done."""
    begun: set[Path] = set()
    to_do = list(studies)
    while to_do:
        rounds = [study.next() for study in to_do]
        new = [own for asked in rounds for own in _new(asked, begun, console)]
        left = [own for own in new if not is_done(own.folder)]
        check_optimizers(left)
        with (
            one_thread() if left else contextlib.nullcontext(),
            listening() as stop,
            Workers(left, min(jobs, len(left)), studies[0].folder / "logs") as workers,
            Progress(new, console) as progress,
        ):
            for study, asked in list(zip(to_do, rounds, strict=True)):
                for _ in workers.waiting(() if asked is None else asked.trials, stop):
                    progress.show()
                progress.show()
                if not _new(study.next(), set(begun)):
                    to_do.remove(study)
                    if words := conclude(study):
                        progress.say(words)


def _new(asked: Round | None, begun: set[Path], console: Console | None = None) -> list[Trial]:
    """The trials of a round that were not begun before, each once; from now on they are."""
    if asked is None:
        return []
    new = {own.folder: own for own in asked.trials if own.folder not in begun}
    begun.update(new)
    if new and asked.title and console is not None:
        console.print(asked.title, style="bold", markup=False, soft_wrap=True)
    return list(new.values())
