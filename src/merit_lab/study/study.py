"""The interface of a study, and the loop that trains its rounds until no trial is missing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.results.old_charts import check_charts
from merit_lab.results.write import refuse_folder
from merit_lab.study.check import check_trials
from merit_lab.study.cost import estimate
from merit_lab.study.progress import StudyProgress
from merit_lab.study.runner import carry_out
from merit_lab.study.state import is_done
from merit_lab.study.trial import Trial
from merit_lab.study.workers import Workers, one_thread
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import listening


@dataclass(frozen=True)
class Round:
    """Trials that a study wants at the same time, and a title to print before them."""

    trials: Sequence[Trial]
    title: str = ""
    later: Sequence[Trial] = ()
    """As many new trials as may follow. A trial whose settings are not known yet is given by one as long."""


class Findings(Protocol):
    """The answer of a study."""

    @property
    def summary(self) -> str:
        """The answer in one or a few sentences."""

    @property
    def warnings(self) -> Sequence[str]:
        """Caveats that a reader must know before using the answer."""

    def show(self) -> None:
        """Print the main tables to the terminal."""

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, overwriting earlier ones; return the path of the page."""


class TrialSource(Protocol):
    """A source of trials, one round at a time.

    The next round depends on the run directories only. So a study that was stopped can be continued, and
    several processes may work on the same one.
    """

    @property
    def folder(self) -> Path:
        """Folder of the run directories."""

    def next(self) -> Round | None:
        """All trials that are needed so far, including those that are done; None when none is missing."""


class Study(TrialSource, Protocol):
    """A question that training runs answer."""

    def findings(self) -> Findings:
        """Return the answer, computed from the run directories only."""


@dataclass(frozen=True)
class Conclusion:
    """A study's summary and warnings, and the path of its page."""

    summary: str
    warnings: Sequence[str]
    page: Path


def run_study(study: Study, jobs: int = 1) -> Conclusion | None:
    """Carry out a study, print its findings, and write them to ``folder``/report.

    Finished runs are not repeated: after an interruption the same call continues. Under torchrun only the
    first rank reports; the others return None.

    Args:
        study: the study.
        jobs: number of trials to train at the same time.
    """
    ranks = Ranks.join()
    _check_jobs(jobs, ranks)
    report = study.folder / "report"
    ranks.first(partial(refuse_folder, report))  # before training, not after it
    check_studies([study], ranks)
    if (message := ranks.first(partial(_first_estimate, study, jobs))) and ranks.is_first:
        print(message, file=sys.stderr)
    conduct([study], ranks, jobs)
    if not ranks.is_first:
        return None
    findings = study.findings()
    page = findings.write(report)
    findings.show()
    return Conclusion(findings.summary, findings.warnings, page)


def _check_jobs(jobs: int, ranks: Ranks) -> None:
    check_at_least("--jobs", jobs, 1)
    if jobs > 1 and ranks.size > 1:
        raise ValueError(
            f"--jobs is {jobs}, but the {ranks.size} processes of torchrun train one run at a time together; "
            "leave out --jobs, or start the command without torchrun"
        )


def check_studies(studies: Iterable[TrialSource], ranks: Ranks) -> None:
    """Raise if a trial of the studies' first rounds, or one that may follow, cannot be trained."""

    def check() -> None:
        rounds = [wanted for study in studies if (wanted := study.next()) is not None]
        check_trials((trial for wanted in rounds for trial in (*wanted.trials, *wanted.later)), ranks)

    ranks.first(check)


def _first_estimate(study: Study, jobs: int) -> str:
    """The estimated cost of the first round, and of those that may follow."""
    first = study.next()
    return "" if first is None else estimate(first.trials, first.later, jobs)


S = TypeVar("S", bound=TrialSource)


def conduct(
    studies: Sequence[S], ranks: Ranks, jobs: int = 1, conclude: Callable[[S], str] = lambda _: ""
) -> None:
    """Carry out studies. After a signal, the same call continues.

    No trial is started twice. A trial that another process works on is left to that process.

    Args:
        studies: the studies, in order of priority.
        ranks: the processes that train together.
        jobs: number of trials to train at the same time.
        conclude: called on the first rank when all trials of a study are done; its result is printed.
    """
    _check_jobs(jobs, ranks)
    ranks.first(check_charts)
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    if jobs > 1:
        _side_by_side(studies, jobs, console, conclude)
        return
    for study in studies:
        begun: set[Path] = set()
        while new := _new(ranks.first(study.next), begun, console):
            carry_out(new, ranks)
        if message := ranks.first(partial(conclude, study)):
            console.print(message, markup=False, soft_wrap=True)


def _side_by_side(studies: Sequence[S], jobs: int, console: Console, conclude: Callable[[S], str]) -> None:
    """Train trials of all studies at the same time; conclude each study when its trials are done."""
    begun: set[Path] = set()
    to_do = list(studies)
    while to_do:
        rounds = [study.next() for study in to_do]
        new = [trial for wanted in rounds for trial in _new(wanted, begun, console)]
        left = [trial for trial in new if not is_done(trial.folder)]
        with (
            one_thread() if left else contextlib.nullcontext(),
            listening() as stop,
            Workers(left, min(jobs, len(left)), studies[0].folder / "logs") as workers,
            StudyProgress(new, console) as progress,
        ):
            for study, wanted in list(zip(to_do, rounds, strict=True)):
                for _ in workers.waiting(() if wanted is None else wanted.trials, stop):
                    progress.show()
                progress.show()
                if not _new(study.next(), set(begun)):
                    to_do.remove(study)
                    if message := conclude(study):
                        progress.say(message)


def _new(wanted: Round | None, begun: set[Path], console: Console | None = None) -> list[Trial]:
    """Return the trials of a round that are not in ``begun``, each once, and add them to it."""
    if wanted is None:
        return []
    new = {trial.folder: trial for trial in wanted.trials if trial.folder not in begun}
    begun.update(new)
    if new and wanted.title and console is not None:
        console.print(wanted.title, style="bold", markup=False, soft_wrap=True)
    return list(new.values())
