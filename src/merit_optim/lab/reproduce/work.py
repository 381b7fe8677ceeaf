"""Entries are made one after the other: runs, what is measured of them, analysis, the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from merit_optim.lab.compare import PlannedRun, carry_out
from merit_optim.lab.data import Dataset
from merit_optim.lab.record import Run
from merit_optim.lab.reproduce import records
from merit_optim.lab.reproduce.entry import Entry, Unavailable
from merit_optim.lab.reproduce.registry import ENTRIES
from merit_optim.lab.reproduce.scale import Scale, Trial
from merit_optim.lab.reproduce.write import write_entry, write_missing, write_overview
from merit_optim.lab.train.parallel import Ranks

Planned = list[tuple[Trial, PlannedRun]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked for: entries at a scale, with data, into a folder."""

    entries: Sequence[Entry]
    scale: Scale
    dataset: Dataset
    folder: Path
    seeds: int | None = None
    """Seeds of every entry; None for the scale's own."""
    task_files: Path | None = None
    """Folder of evaluation sets."""

    def plan(self, entry: Entry) -> Planned:
        """An entry's runs; those of all entries lie together, so that they are shared."""
        trials = entry.trials(self.scale, entry.num_seeds(self.scale, self.seeds))
        return records.plan(trials, self.folder / "runs", self.dataset)


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return what verdict.json says of each; what is there is not run again.

    An entry that cannot be made is told of and left out, and the others are made all the same. Under
    torchrun all ranks train, and the first does the rest.
    """
    ranks = Ranks.join()
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    plans = {entry.name: task.plan(entry) for entry in task.entries}
    every = {own.folder for planned in plans.values() for _, own in planned}
    said = []
    for place, entry in enumerate(task.entries, start=1):
        num_done = sum(is_done(folder) for folder in every)
        text = f"{entry.name} ({place} of {len(plans)}; {num_done} of all {len(every)} runs are done)"
        console.rule(text, align="left", style="bold")
        planned = plans[entry.name]
        to_do = list({own.folder: own for _, own in planned if not is_done(own.folder)}.values())
        carry_out(to_do, ranks)
        said += ranks.first(lambda entry=entry, planned=planned: [_make(task, entry, planned, console)])  # type: ignore[misc]
    return said


def is_done(folder: Path) -> bool:
    """Whether a run has come to its end, good or bad."""
    return (folder / "config.json").exists() and Run.open(folder).status in ("finished", "diverged")


def _make(task: Task, entry: Entry, planned: Planned, console: Console) -> dict[str, Any]:
    """Measure, analyse and write one entry, and the overview."""
    folder = task.folder / entry.name
    try:
        found = records.read(planned)
        if entry.measure is not None:
            for own in found.all:
                if own.status == "finished":
                    entry.measure(own, task.scale, task.task_files)
        said = write_entry(entry, task.scale, entry.analyse(found, task.scale), found, folder)
    except Unavailable as missing:
        said = write_missing(entry, task.scale, str(missing), folder)
        console.print(f"{entry.name} is left out: {missing}", style="yellow", markup=False, soft_wrap=True)
    write_overview(task.scale, list(ENTRIES.values()), task.folder)
    return said
