"""Entries are made one after the other: runs, what is measured of them, analysis, the overview."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from merit_lab.report.figures import unchecked
from merit_lab.reproduce import records
from merit_lab.reproduce.corpus import Corpus
from merit_lab.reproduce.entry import Entry, Unavailable
from merit_lab.reproduce.registry import ENTRIES
from merit_lab.reproduce.scale import Scale, Shown
from merit_lab.reproduce.write import write_entry, write_missing, write_overview
from merit_lab.study.progress import Progress
from merit_lab.study.runner import carry_out
from merit_lab.study.trial import Trial
from merit_lab.study.workers import Workers, is_done, one_thread
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import listening

Planned = list[tuple[Shown, Trial]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked for: entries at a scale, with data, into a folder."""

    entries: Sequence[Entry]
    scale: Scale
    corpus: Corpus
    folder: Path
    seeds: int | None = None
    """Seeds of every entry; None for the scale's own."""
    task_files: Path | None = None
    """Folder of evaluation sets."""
    jobs: int = 1
    """Runs at the same time."""
    trains: bool = True
    """Whether runs that are missing are made; else entries are made from what is there."""

    def plan(self, entry: Entry) -> Planned:
        """An entry's runs; those of all entries lie together, so that they are shared."""
        trials = entry.trials(self.scale, entry.num_seeds(self.scale, self.seeds))
        return records.plan(trials, self.folder / "runs", self.corpus)


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return what verdict.json says of each; what is there is not run again.

    An entry that cannot be made is told of and left out, and the others are made all the same. Under
    torchrun all ranks train, and the first does the rest.
    """
    ranks = Ranks.join()
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    plans = {entry.name: task.plan(entry) for entry in task.entries}
    every = list({own.folder: own for planned in plans.values() for _, own in planned}.values())
    if task.trains and task.jobs > 1 and ranks.size == 1:
        return _together(task, plans, every, console)
    said = []
    for place, entry in enumerate(task.entries, start=1):
        num_done = sum(is_done(own.folder) for own in every)
        text = f"{entry.name} ({place} of {len(plans)}; {num_done} of all {len(every)} runs are done)"
        console.rule(text, align="left", style="bold")
        if task.trains:
            carry_out(_left(plans[entry.name]), ranks)
        said += ranks.first(partial(_make, task, entry, plans[entry.name], console))
    return said


def _together(
    task: Task, plans: dict[str, Planned], every: Sequence[Trial], console: Console
) -> list[dict[str, Any]]:
    """Several runs at a time, in the order of the entries; each entry is made when its runs are done."""
    said: list[dict[str, Any]] = []
    left = [own for own in every if not is_done(own.folder)]
    with (
        one_thread() if left else contextlib.nullcontext(),
        listening() as stop,
        Workers(left, min(task.jobs, len(left)), task.folder / "logs") as workers,
        Progress(every, console) as progress,
    ):
        for entry in task.entries:
            for _ in workers.waiting([own for _, own in plans[entry.name]], stop):
                progress.show()
            progress.show()
            said += _make(task, entry, plans[entry.name], console)
            progress.say(f"{entry.name}: {said[-1]['outcome']}")
    return said


def _left(planned: Planned) -> list[Trial]:
    return list({own.folder: own for _, own in planned if not is_done(own.folder)}.values())


def _make(task: Task, entry: Entry, planned: Planned, console: Console) -> list[dict[str, Any]]:
    """Measure, analyse and write one entry, and the overview."""
    folder = task.folder / entry.name
    try:
        found = records.read(planned)
        _measure(task, entry, found)
        with unchecked():
            result = entry.analyse(found, task.scale)
        said = write_entry(entry, task.scale, result, found, folder)
    except Unavailable as missing:
        said = write_missing(entry, task.scale, str(missing), folder)
        console.print(f"{entry.name} is left out: {missing}", style="yellow", markup=False, soft_wrap=True)
    write_overview(task.scale, list(ENTRIES.values()), task.folder)
    return [said]


def _measure(task: Task, entry: Entry, found: records.Records) -> None:
    """Measure what is not in the run directories yet; what goes wrong is one entry's trouble alone."""
    if entry.measure is None:
        return
    for own in found.all:
        if own.status == "finished":
            try:
                entry.measure(own, task.scale, task.task_files)
            except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                raise Unavailable(f"{own.folder.name} could not be measured: {error}") from error
