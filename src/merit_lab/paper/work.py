"""Make entries: train what is missing, measure, judge, and write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import tyro

from merit_lab.checks import check_size
from merit_lab.data import Dataset
from merit_lab.data.command import make as prepare
from merit_lab.paper.artefact import Artefact, Result, write_overview
from merit_lab.paper.entries import choose
from merit_lab.paper.entry import Entry
from merit_lab.paper.measured import Unavailable
from merit_lab.paper.plan import Corpus, plan
from merit_lab.paper.records import Data, Records
from merit_lab.paper.scales import SCALES, Scale
from merit_lab.study.search import carry_out
from merit_lab.study.trial import Trial
from merit_lab.train.parallel import Ranks

_MOST_JOBS = 8


@dataclass(frozen=True, kw_only=True)
class Task:
    """Which entries to make, and how: the arguments of `merit reproduce`."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Figures and tables to reproduce, by their names."""
    scale: Literal["tiny", "nano", "small", "paper"] = "tiny"
    """Size of the models to train."""
    data: Path | None = None
    """Token files, as `merit prepare` writes them. None: at tiny and nano, Python's sources."""
    seeds: int | None = None
    """Seeds of every entry. None: set by the scale."""
    out: Path | None = None
    """Folder for runs and pages. None: runs/reproduce-SCALE."""
    task_files: Path | None = None
    """Sets for fig5, fig12 and table1 (see `merit evaluate -h`)."""
    jobs: int | None = None
    """Runs trained at the same time. None: one per core, one on a GPU."""
    storage: str | None = None
    """URL of a database that hands out the runs. None: a file in OUT."""
    no_training: bool = False
    """Use only runs that exist; needs no data."""
    list: bool = False
    """List entries and what they cost on this machine."""
    yes: bool = False
    """Start without asking, even if it takes many GPU hours or days."""

    def __post_init__(self) -> None:
        for name in ("seeds", "jobs"):
            if (value := getattr(self, name)) is not None:
                check_size(f"--{name}", value)
        if not self.names and not self.list:
            raise ValueError("give names of entries: merit reproduce fig4; or merit reproduce all; or --list")

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, in the paper's order."""
        return choose(self.names or ["all"])

    @property
    def at_scale(self) -> Scale:
        """What the scale stands for."""
        return SCALES[self.scale]

    @property
    def folder(self) -> Path:
        """The folder for runs and pages."""
        return self.out or Path("runs", f"reproduce-{self.scale}")

    @cached_property
    def corpus(self) -> Corpus:
        """The data to train on; with --no-training, those of the runs in the folder."""
        known = Records.read(self.folder).corpora
        if self.no_training and self.data is None:
            if len(known) != 1:
                held = "runs of several texts" if known else "no runs"
                raise ValueError(f"{self.folder} holds {held}; give a folder of runs of one text with --out")
            return known[0]
        corpus = Corpus.of(Dataset.open(self.data or _prepared(self.at_scale)))
        for other in known:
            if other.fingerprint != corpus.fingerprint:  # a page cannot tell two corpora apart
                raise ValueError(
                    f"{corpus.folder} is not the data of the runs in {self.folder}: its fingerprint is "
                    f"{corpus.fingerprint}, that of their data ({other.folder}) {other.fingerprint}; give "
                    "theirs with --data, or another folder with --out"
                )
        return corpus

    def all_rows(self, corpus: Corpus) -> dict[str, Data]:
        """The rows of all entries that have runs."""
        records = Records.read(self.folder)
        return {entry.name: self.rows(entry, records, corpus) for entry in self.entries if entry.runs}

    def rows(self, entry: Entry, records: Records | None = None, corpus: Corpus | None = None) -> Data:
        """The rows of an entry, of the runs that are there."""
        if entry.made_up is not None:
            return entry.made_up()
        seeds = self.seeds or entry.num_seeds(self.at_scale)
        planned = plan(entry.runs, self.at_scale, seeds, corpus or self.corpus)
        return (records or Records.read(self.folder)).data(planned, self.at_scale.evaluation_limit)

    def make(self, entry: Entry, records: Records | None = None) -> Artefact:
        """An entry from the runs that are there, or why it cannot be made; no other entry is affected."""
        try:
            data = self.rows(entry, records)
            if entry.measure is not None:
                try:
                    entry.measure(data, self.at_scale, self.task_files)
                except (ArithmeticError, ImportError, OSError, RuntimeError, ValueError) as error:
                    raise Unavailable(f"A run could not be measured: {error}") from error
                data = self.rows(entry)
            artefact = Artefact(entry, self.at_scale, data)
            artefact.page  # noqa: B018  # which reads weights
            return artefact
        except Unavailable as missing:
            return Artefact(entry, self.at_scale, None, str(missing))


def reproduce(task: Task) -> list[Result]:
    """Make all entries and return what came out of each. Runs that are done are not repeated.

    An entry is written as soon as its runs are done. One that cannot be made is reported, and the others are
    still made. Under torchrun all ranks train, and the first does the rest.
    """
    ranks, made = Ranks.join(), dict[str, Result]()
    corpus, left = task.corpus, dict[str, list[Trial]]()  # all ranks prepare the data
    if not task.no_training:
        left = ranks.first(lambda: {name: data.left for name, data in task.all_rows(corpus).items()})

    def write(*, whatever_is_left: bool = False) -> None:
        for entry in task.entries:
            is_ready = whatever_is_left or all(trial.is_done for trial in left.get(entry.name, ()))
            if entry.name not in made and is_ready:
                artefact = task.make(entry)
                artefact.write(task.folder / entry.name)
                write_overview(task.at_scale, task.folder)
                made[entry.name] = artefact.result

    if trials := {trial.folder: trial for of_entry in left.values() for trial in of_entry}:
        jobs = task.jobs or _default_jobs(ranks)
        carry_out(list(trials.values()), task.folder, jobs, task.storage, conclude=write)
    ranks.first(lambda: write(whatever_is_left=True))
    return [made[entry.name] for entry in task.entries] if ranks.is_first else []


def _default_jobs(ranks: Ranks) -> int:
    """One process for each core: a small model does not keep two busy. With GPUs, use torchrun."""
    return 1 if ranks.size > 1 or ranks.device.type == "cuda" else min(os.cpu_count() or 1, _MOST_JOBS)


def _prepared(scale: Scale) -> Path:
    """The folder of the text that every machine has, prepared if it is missing."""
    if (tokenizer := scale.tokenizer) is None:
        raise ValueError(
            f"scale {scale.name} needs --data: a folder that `merit prepare openwebtext` wrote (for figure "
            "6, `merit prepare c4`, and a separate --out)"
        )
    folder = Path("data", "embedded" if tokenizer == "bytes" else f"embedded-{tokenizer}")
    if status := Ranks.join().first(lambda: prepare("embedded", folder, tokenizer)):
        raise ValueError(f"the data could not be prepared (status {status}); give some with --data")
    return folder
