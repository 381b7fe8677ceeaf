"""Make entries: train what is missing, measure, judge, and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merit_lab.paper.artefact import Artefact, Missing, write_overview
from merit_lab.paper.entries import Entry
from merit_lab.paper.measured import Unavailable
from merit_lab.paper.plan import Corpus, Data, Found, Planned, plan
from merit_lab.paper.scales import Scale
from merit_lab.study import Trial
from merit_lab.study.search import carry_out
from merit_lab.study.state import is_done
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

    def planned(self, entry: Entry) -> list[Planned]:
        """The runs of an entry."""
        return plan(entry.runs, self.scale, entry.num_seeds(self.scale, self.seeds))

    def make(self, entry: Entry, found: Found | None = None) -> Artefact | Missing:
        """An entry from the runs that are there, or why it cannot be made; no other entry is affected."""
        try:
            data = self._data(entry, found)
            if entry.measure is not None:
                try:
                    entry.measure(data, self.scale, self.task_files)
                except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                    raise Unavailable(f"A run could not be measured: {error}") from error
                data = self._data(entry)
            return Artefact.of(entry, self.scale, data)
        except Unavailable as missing:
            return Missing(entry, self.scale, str(missing))

    def _data(self, entry: Entry, found: Found | None = None) -> Data:
        if entry.made_up is not None:
            return entry.made_up()
        found, planned = found or Found.in_folder(self.folder), self.planned(entry)
        trials = found.trials(planned, self.folder, self.corpus)
        return found.data(planned, trials, self.corpus, self.scale.evaluation_limit)


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return the content of each verdict.json. Runs that are done are not repeated.

    An entry is written as soon as its runs are done. One that cannot be made is reported, and the others are
    still made. Under torchrun all ranks train, and the first does the rest.
    """
    ranks = Ranks.join()
    trials = ranks.first(lambda: _trials(task))
    made = _Made(task, trials)
    if task.trains:
        wanted = {trial.folder: trial for of_entry in trials.values() for trial in of_entry}
        if left := ranks.first(lambda: [trial for trial in wanted.values() if not is_done(trial.folder)]):
            carry_out(left, task.folder, task.jobs, task.storage, conclude=made.those_that_are_done)
    ranks.first(made.all)
    return [made.verdicts[entry.name] for entry in task.entries] if ranks.is_first else []


def _trials(task: Task) -> dict[str, list[Trial]]:
    found = Found.in_folder(task.folder)
    return {entry.name: found.trials(task.planned(entry), task.folder, task.corpus) for entry in task.entries}


@dataclass(frozen=True)
class _Made:
    """The entries made so far."""

    task: Task
    trials: dict[str, list[Trial]]
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def those_that_are_done(self) -> None:
        """Make the entries whose runs are all done."""
        for entry in self.task.entries:
            is_new = entry.name not in self.verdicts
            if (
                is_new
                and self.trials[entry.name]
                and all(is_done(one.folder) for one in self.trials[entry.name])
            ):
                self._make(entry)

    def all(self) -> None:
        """Make the others."""
        for entry in self.task.entries:
            if entry.name not in self.verdicts:
                self._make(entry)

    def _make(self, entry: Entry) -> None:
        artefact = self.task.make(entry)
        artefact.write(self.task.folder / entry.name)
        write_overview(self.task.scale, self.task.folder)
        self.verdicts[entry.name] = artefact.verdict
