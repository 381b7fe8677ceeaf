"""Make entries: train what is missing, measure, judge, and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.paper.artefact import Artefact, write_overview
from merit_lab.paper.entry import Entry
from merit_lab.paper.measured import Unavailable
from merit_lab.paper.plan import Corpus, Data, Found, plan
from merit_lab.paper.scales import Scale
from merit_lab.study.search import carry_out
from merit_lab.study.trial import Trial
from merit_lab.train.parallel import Ranks


@dataclass(frozen=True)
class Task:
    """Entries to make at a scale, from data, into a folder."""

    entries: Sequence[Entry]
    scale: Scale
    corpus: Corpus
    folder: Path
    seeds: int | None = None
    """Of every entry; None for the scale's default."""
    task_files: Path | None = None
    """Folder of evaluation sets."""
    jobs: int = 1
    """Runs trained at the same time."""
    storage: str | None = None
    """URL of a database that holds the trials in place of a journal in the folder."""
    trains: bool = True
    """Whether to train missing runs; otherwise only existing runs are used."""

    def data(self, entry: Entry, found: Found | None = None) -> Data:
        """The rows of an entry, of the runs that are there."""
        if entry.made_up is not None:
            return entry.made_up()
        planned = plan(entry.runs, self.scale, entry.num_seeds(self.scale, self.seeds))
        found = found or Found.in_folder(self.folder)
        return found.data(planned, self.folder, self.corpus, self.scale.evaluation_limit)

    def make(self, entry: Entry, found: Found | None = None) -> Artefact:
        """An entry from the runs that are there, or why it cannot be made; no other entry is affected."""
        try:
            data = self.data(entry, found)
            if entry.measure is not None:
                try:
                    entry.measure(data, self.scale, self.task_files)
                except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                    raise Unavailable(f"A run could not be measured: {error}") from error
                data = self.data(entry)
            artefact = Artefact(entry, self.scale, data)
            artefact.page  # noqa: B018  # which reads weights
            return artefact
        except Unavailable as missing:
            return Artefact(entry, self.scale, None, str(missing))


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return the content of each verdict.json. Runs that are done are not repeated.

    An entry is written as soon as its runs are done. One that cannot be made is reported, and the others are
    still made. Under torchrun all ranks train, and the first does the rest.
    """
    ranks, made = Ranks.join(), dict[str, dict[str, Any]]()
    left = ranks.first(lambda: _left(task))

    def write(*, whatever_is_left: bool = False) -> None:
        for entry in task.entries:
            is_ready = whatever_is_left or all(trial.is_done for trial in left[entry.name])
            if entry.name not in made and is_ready:
                artefact = task.make(entry)
                artefact.write(task.folder / entry.name)
                write_overview(task.scale, task.folder)
                made[entry.name] = artefact.content

    trials = {trial.folder: trial for of_entry in left.values() for trial in of_entry}
    if task.trains and trials:
        carry_out(list(trials.values()), task.folder, task.jobs, task.storage, conclude=write)
    ranks.first(lambda: write(whatever_is_left=True))
    return [made[entry.name] for entry in task.entries] if ranks.is_first else []


def _left(task: Task) -> dict[str, list[Trial]]:
    """The trials of each entry that are not done."""
    found, of_runs = Found.in_folder(task.folder), [entry for entry in task.entries if entry.runs]
    left = {entry.name: task.data(entry, found).left for entry in of_runs}
    return {entry.name: left.get(entry.name, []) for entry in task.entries}
