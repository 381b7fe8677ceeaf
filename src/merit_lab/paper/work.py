"""Make entries one after the other: train, measure, analyse, and update the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.paper import records
from merit_lab.paper.corpus import CorpusIdentity
from merit_lab.paper.entry import PaperEntry, Unavailable
from merit_lab.paper.registry import ENTRIES
from merit_lab.paper.setups import EntryTrial, Scale
from merit_lab.paper.write import EntryFindings, MissingEntry, write_overview
from merit_lab.results.figures import unchecked
from merit_lab.study import Round, Trial, conduct
from merit_lab.study.state import is_done
from merit_lab.study.study import check_studies
from merit_lab.train.parallel import Ranks


@dataclass(frozen=True, kw_only=True)
class Task:
    """Entries to make at a scale, from data, into a folder."""

    entries: Sequence[PaperEntry]
    scale: Scale
    corpus: CorpusIdentity
    folder: Path
    seeds: int | None = None
    """Seeds of every entry; None for the scale's default."""
    task_files: Path | None = None
    """Folder of evaluation sets."""
    jobs: int = 1
    """Runs trained at the same time."""
    trains: bool = True
    """Whether to train missing runs; otherwise only existing runs are used."""

    def plan(self, entry: PaperEntry) -> list[tuple[EntryTrial, Trial]]:
        """An entry's trials. All entries use one folder of runs, so they can share them."""
        trials = entry.trials(self.scale, entry.num_seeds(self.scale, self.seeds))
        return records.plan(trials, self.folder / "runs", self.corpus)


@dataclass(frozen=True)
class EntryStudy:
    """An entry as a study. All its trials are known from the start, and may be shared with other entries."""

    task: Task
    entry: PaperEntry

    @property
    def folder(self) -> Path:
        return self.task.folder

    def next(self) -> Round | None:
        if not self.task.trains:
            return None
        left = [trial for _, trial in self.task.plan(self.entry) if not is_done(trial.folder)]
        place = 1 + [entry.name for entry in self.task.entries].index(self.entry.name)
        return Round(left, f"{self.entry.name} ({place} of {len(self.task.entries)})")

    def findings(self) -> EntryFindings | MissingEntry:
        """The entry's findings, or the reason why it cannot be made."""
        task, entry = self.task, self.entry
        try:
            trial_records = records.read(task.plan(entry))
            self._measure(trial_records)
            with unchecked():
                return EntryFindings(
                    entry, task.scale, trial_records, entry.analyse(trial_records, task.scale)
                )
        except Unavailable as missing:
            return MissingEntry(entry, task.scale, str(missing))

    def _measure(self, trial_records: records.Records) -> None:
        """Measure finished runs that were not measured yet. A failure affects only this entry."""
        for record in trial_records.all:
            if self.entry.measure is not None and record.status == "finished":
                try:
                    self.entry.measure(record, self.task.scale, self.task.task_files)
                except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                    raise Unavailable(f"{record.folder.name} could not be measured: {error}") from error


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return the content of each verdict.json. Runs that are done are not repeated.

    An entry that cannot be made is reported and left out; the others are still made. Under torchrun all
    ranks train, and the first does the rest.
    """
    verdicts: list[dict[str, Any]] = []

    def conclude(study: EntryStudy) -> str:
        findings = study.findings()
        findings.write(task.folder / study.entry.name)
        write_overview(task.scale, list(ENTRIES.values()), task.folder)
        verdicts.append(findings.verdict)
        return findings.summary

    studies, ranks = [EntryStudy(task, entry) for entry in task.entries], Ranks.join()
    check_studies(studies, ranks)
    conduct(studies, ranks, task.jobs, conclude)
    return verdicts
