"""Entries are made one after the other: runs, what is measured of them, analysis, the overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.report.figures import unchecked
from merit_lab.reproduce import records
from merit_lab.reproduce.corpus import Corpus
from merit_lab.reproduce.entry import Entry, Unavailable
from merit_lab.reproduce.registry import ENTRIES
from merit_lab.reproduce.scale import Scale, Shown
from merit_lab.reproduce.write import EntryFindings, Missing, write_overview
from merit_lab.study import Round, Trial, conduct
from merit_lab.study.workers import is_done
from merit_lab.train.parallel import Ranks


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

    def plan(self, entry: Entry) -> list[tuple[Shown, Trial]]:
        """An entry's runs; those of all entries lie together, so that they are shared."""
        trials = entry.trials(self.scale, entry.num_seeds(self.scale, self.seeds))
        return records.plan(trials, self.folder / "runs", self.corpus)


@dataclass(frozen=True)
class EntryStudy:
    """An entry as a study. Its trials are known from the beginning, and shared with other entries."""

    task: Task
    entry: Entry

    @property
    def folder(self) -> Path:
        return self.task.folder

    def next(self) -> Round | None:
        if not self.task.trains:
            return None
        left = [own for _, own in self.task.plan(self.entry) if not is_done(own.folder)]
        place = 1 + [own.name for own in self.task.entries].index(self.entry.name)
        return Round(left, f"{self.entry.name} ({place} of {len(self.task.entries)})")

    def findings(self) -> EntryFindings | Missing:
        """What its runs came to; or, where it cannot be made of them, why not."""
        task, entry = self.task, self.entry
        try:
            found = records.read(task.plan(entry))
            self._measure(found)
            with unchecked():
                return EntryFindings(entry, task.scale, found, entry.analyse(found, task.scale))
        except Unavailable as missing:
            return Missing(entry, task.scale, str(missing))

    def _measure(self, found: records.Records) -> None:
        """Measure what is not in the run directories yet; what goes wrong is one entry's trouble alone."""
        for own in found.all:
            if self.entry.measure is not None and own.status == "finished":
                try:
                    self.entry.measure(own, self.task.scale, self.task.task_files)
                except (ArithmeticError, OSError, RuntimeError, ValueError) as error:
                    raise Unavailable(f"{own.folder.name} could not be measured: {error}") from error


def reproduce(task: Task) -> list[dict[str, Any]]:
    """Make all entries and return what verdict.json says of each; what is there is not run again.

    An entry that cannot be made is told of and left out, and the others are made all the same. Under
    torchrun all ranks train, and the first does the rest.
    """
    verdicts: list[dict[str, Any]] = []

    def conclude(study: EntryStudy) -> str:
        findings = study.findings()
        findings.write(task.folder / study.entry.name)
        write_overview(task.scale, list(ENTRIES.values()), task.folder)
        verdicts.append(findings.verdict)
        return findings.summary

    conduct([EntryStudy(task, entry) for entry in task.entries], Ranks.join(), task.jobs, conclude)
    return verdicts
