"""`merit reproduce`: reproduce figures and tables of the paper, with verdicts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from merit_lab.data import Dataset
from merit_lab.data.command import make
from merit_lab.folders import refuse_file
from merit_lab.paper.artefact import check_scale, tally
from merit_lab.paper.entries import ENTRIES, choose
from merit_lab.paper.entry import Entry
from merit_lab.paper.plan import Corpus, Found, Runs, plan
from merit_lab.paper.scales import SCALES, Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.runs import OVER
from merit_lab.study import cost
from merit_lab.study.command import exit_status
from merit_lab.study.cost import UTILISATION, Cost, Speed, duration
from merit_lab.text import amount
from merit_lab.train.parallel import Ranks
from merit_lab.train.reports import peak_flops

_MAX_JOBS = 8
_DAY = 86400.0  # seconds
_SMALL_COST = 1e15  # FLOPs: hours on a slow core, so there is no need to measure the speed
_REFERENCE_GPU = "H100"
_COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells do."""
    options = _parse(argv)
    scale = SCALES[options.scale]
    folder = options.out or Path("runs", f"reproduce-{scale.name}")

    def work() -> int:
        entries = choose(options.names or ["all"])
        if options.list:
            _Costs(scale, options, folder).show(entries)
            return 0
        refuse_file(folder)
        check_scale(scale, folder)
        if not options.no_training and not _agreed(entries, scale, options, folder):
            return 1
        task = Task(
            entries=entries,
            scale=scale,
            corpus=_corpus(scale, options, folder),
            folder=folder,
            seeds=options.seeds,
            task_files=options.task_files,
            jobs=options.jobs or _default_jobs(),
            storage=options.storage,
            trains=not options.no_training,
        )
        verdicts = reproduce(task)
        if Ranks.join().is_first:
            _print_verdicts(verdicts, folder)
        return 0

    return exit_status("merit reproduce", work)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(f"  {entry.name:<12} {entry.title}" for entry in ENTRIES.values())
    scales = "\n".join(f"  {scale.name:<12} {scale.summary}" for scale in SCALES.values())
    parser = argparse.ArgumentParser(
        prog="merit reproduce",
        description="Reproduce figures and tables of the MERIT paper, each with a verdict: whether the "
        "paper's claim held here.\nRuns that exist are used and missing ones trained; repeat the command to "
        f"resume after an interruption.\n\nnames:\n  all          all of these\n{names}\n\nscales:\n{scales}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("names", nargs="*", metavar="NAME", help="figures and tables to reproduce")
    option("--scale", choices=SCALES, default="tiny", help="size of the models to train (%(default)s)")
    option("--data", type=Path, help="token files, as `merit prepare` writes them")
    option("--seeds", type=_count, help="seeds of every entry; default: set by the scale")
    option("--out", type=Path, help="folder for runs and pages (runs/reproduce-SCALE)")
    option("--task-files", type=Path, help="sets for fig5, fig12 and table1 (see `merit evaluate -h`)")
    option("--jobs", type=_count, help="runs trained at the same time; default: one per core, one on a GPU")
    option("--storage", help="URL of a database that hands out the runs; default: a file in --out")
    option("--no-training", action="store_true", help="use only runs that exist; needs no data")
    option("--list", action="store_true", help="list entries and what they cost on this machine")
    option("--yes", action="store_true", help="start without asking, even if it takes many GPU hours or days")
    options = parser.parse_args(argv)
    if not options.names and not options.list:
        parser.error("give names of entries: merit reproduce fig4; or merit reproduce all; or --list")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _default_jobs() -> int:
    """One process for each core: a small model does not keep two busy. With GPUs, use torchrun."""
    ranks = Ranks.join()
    return 1 if ranks.size > 1 or ranks.device.type == "cuda" else min(os.cpu_count() or 1, _MAX_JOBS)


def _corpus(scale: Scale, options: argparse.Namespace, folder: Path) -> Corpus:
    """The data to train on; with --no-training, those of the runs in the folder."""
    known = Corpus.recall(folder)
    if options.no_training and options.data is None:
        if known is None:
            raise ValueError(
                f"{folder} holds no runs of known data; give their folder with --out, their data with --data"
            )
        return known
    corpus = Corpus.of(_data(scale, options.data))
    # The overview and data.json of a folder cannot tell two corpora apart.
    if known is not None and known.fingerprint != corpus.fingerprint:
        raise ValueError(
            f"{corpus.folder} is not the data of the runs in {folder}: its fingerprint is "
            f"{corpus.fingerprint}, that of their data ({known.folder.name}) {known.fingerprint}; give "
            "theirs with --data, or another folder with --out"
        )
    if not options.no_training and Ranks.join().is_first:
        corpus.remember(folder)
    return corpus


def _data(scale: Scale, folder: Path | None) -> Dataset:
    """The data of --data, or the text that every machine has, prepared if it is missing."""
    if folder is None:
        if scale.tokenizer is None:
            raise ValueError(
                f"scale {scale.name} needs --data: a folder that `merit prepare openwebtext` wrote (for "
                "figure 6, `merit prepare c4`, and a separate --out)"
            )
        tokenizer = scale.tokenizer
        folder = prepared = Path("data", "embedded" if tokenizer == "bytes" else f"embedded-{tokenizer}")
        if status := Ranks.join().first(lambda: make("embedded", prepared, tokenizer)):
            raise ValueError(f"the data could not be prepared (status {status}); give some with --data")
    return Dataset.open(folder)


@dataclass(frozen=True)
class _Costs:
    """What entries cost, less the training already done.

    That is deducted only if the data are known, because runs on other data are other runs.
    """

    scale: Scale
    options: argparse.Namespace
    folder: Path

    @cached_property
    def corpus(self) -> Corpus | None:
        """The data, if they are known."""
        data = self.options.data
        return Corpus.recall(self.folder) if data is None else Corpus.of(Dataset.open(data))

    @cached_property
    def found(self) -> Found:
        """The runs that are there."""
        return Found.in_folder(self.folder)

    @cached_property
    def speed(self) -> Speed:
        """This machine's speed; for a large scale on a machine without a GPU, that of a GPU."""
        if self.scale.is_large and Ranks.join().device.type != "cuda":
            peak = peak_flops(_REFERENCE_GPU)
            assert peak is not None
            source = f"stated: {UTILISATION:.0%} of the peak of one {_REFERENCE_GPU}"
            return Speed(UTILISATION * peak, 1, source)
        (one,) = Runs("first", ("adamw",)).planned(self.scale, 1)
        return cost.find_speed(one.config)

    def of_entries(self, entries: Sequence[Entry]) -> Cost:
        """The cost of several entries, runs that they share counted once."""
        seeds = self.options.seeds
        planned = [
            one
            for entry in entries
            for one in plan(entry.runs, self.scale, entry.num_seeds(self.scale, seeds))
        ]
        planned = list({one.config.fingerprint: one for one in planned}.values())
        if self.corpus is None or not planned:
            return Cost.of((one.config, 0) for one in planned)
        data = self.found.data(planned, self.folder, self.corpus)
        # All steps of a run that ended: one that diverged is not repeated either.
        done = pl.when(pl.col("status").is_in(OVER)).then("steps").otherwise("last_step").fill_null(0)
        return Cost.of((data.configs[run], steps) for run, steps in data.runs.select("run", done).iter_rows())

    def show(self, entries: Sequence[Entry]) -> None:
        """Print the list of entries with their costs."""
        console, speed = Console(highlight=False), self.speed
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("Name", no_wrap=True)
        table.add_column("What it shows")
        for head in ("Runs", "Left", "Tokens", "FLOPs", "GPU hours" if speed.num_gpus else "Time"):
            table.add_column(head, justify="right", no_wrap=True)
        rows = [(entry.name, entry.title, [entry]) for entry in entries]
        for name, shows, counted in [*rows, ("together", "runs that entries share counted once", entries)]:
            of_these = self.of_entries(counted)
            hours, seconds = of_these.gpu_hours(speed), of_these.seconds(speed)
            spent = f"{hours:,.2f}" if speed.num_gpus else duration(seconds)
            counts = str(of_these.num_runs), str(of_these.num_left)
            table.add_row(name, shows, *counts, amount(of_these.tokens), f"{of_these.flops:.1e}", spent)
        deducted = f"training already done in {self.folder} is deducted"
        if self.corpus is None and (self.folder / "runs").is_dir():
            deducted = f"give --data to deduct training already done in {self.folder}"
        about = f"Training only; {deducted}. Speed: {speed.flops / 1e12:.3g} TFLOP/s, {speed.source}."
        console.print(f"scale {self.scale.name}: {self.scale.summary}\n", markup=False, soft_wrap=True)
        console.print(table)
        console.print(f"\n{about}", markup=False, soft_wrap=True)


def _agreed(entries: Sequence[Entry], scale: Scale, options: argparse.Namespace, folder: Path) -> bool:
    """Whether to start. If it takes many GPU hours or days, show the cost and ask."""
    ranks, costs = Ranks.join(), _Costs(scale, options, folder)

    def takes_days() -> bool:
        """Whether the rest would take this machine more than a day, as a GPU's scale does on a CPU."""
        of_these = costs.of_entries(entries)
        return of_these.flops >= _SMALL_COST and of_these.seconds(costs.speed) > _DAY

    if not scale.is_large and not ranks.first(takes_days):
        return True
    if ranks.is_first:
        costs.show(entries)
    if options.yes:
        return True
    if ranks.size > 1 or not sys.stdin.isatty():
        print("merit reproduce: pass --yes to start", file=sys.stderr)
        return False
    try:
        return input("Start? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D, after which the cursor is still behind the question
        print()
        return False


def _print_verdicts(verdicts: Sequence[dict[str, Any]], folder: Path) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Entry", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Claim")
    for entry in verdicts:
        lines = [(claim["outcome"], claim["claim"]) for claim in entry.get("verdicts", [])]
        for place, (outcome, claim) in enumerate(lines or [("not run", entry.get("missing", ""))]):
            name = entry["entry"] if place == 0 else ""
            table.add_row(name, Text(outcome, style=_COLOURS.get(outcome, "dim")), Text(claim))
    Console(highlight=False).print(table)
    print(f"\n{tally(verdicts)}\nThe page: {folder / 'index.html'}")
