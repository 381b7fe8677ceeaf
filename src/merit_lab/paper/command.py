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

from rich import box

from merit_lab.data import Dataset
from merit_lab.data.command import make
from merit_lab.folders import refuse_file
from merit_lab.paper.artefact import check_scale, tally
from merit_lab.paper.entries import ENTRIES, Entry, choose
from merit_lab.paper.plan import Corpus, Found, OneRun, Runs, plan
from merit_lab.paper.scales import SCALES, Scale
from merit_lab.paper.work import Task, reproduce
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


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells do."""
    options = _parse(argv)
    scale = SCALES[options.scale]
    folder = options.out or Path("runs", f"reproduce-{scale.name}")

    def work() -> int:
        entries = choose(options.names or ["all"])
        if options.list:
            _Costs.of(scale, options, folder).show(entries)
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
    names = "\n".join(f"  {entry.name:<10} {entry.shows}" for entry in ENTRIES.values())
    scales = "\n".join(f"  {scale.name:<10} {scale.summary}" for scale in SCALES.values())
    parser = argparse.ArgumentParser(
        prog="merit reproduce",
        description="Reproduce figures and tables of the MERIT paper, each with a verdict: whether the "
        "paper's claim held here.\nRuns that exist are used and missing ones trained; repeat the command to "
        f"resume after an interruption.\n\nnames:\n  all        all of these\n{names}\n\nscales:\n{scales}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures and tables to reproduce")
    parser.add_argument(
        "--scale", choices=SCALES, default="tiny", help="size of the models to train (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="token files, as `merit prepare` writes them")
    parser.add_argument("--seeds", type=_count, help="seeds of every entry; default: set by the scale")
    parser.add_argument("--out", type=Path, help="folder for runs and pages (runs/reproduce-SCALE)")
    parser.add_argument(
        "--task-files", type=Path, help="evaluation sets for fig5, fig12 and table1 (see `merit evaluate -h`)"
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        help="runs trained at the same time, sharing cores or GPUs if there are fewer; default: one per core",
    )
    parser.add_argument(
        "--storage", help="URL of a database that hands out the runs; default: a file in --out"
    )
    parser.add_argument(
        "--no-training",
        action="store_true",
        help="use only runs that exist; needs no data",
    )
    parser.add_argument("--list", action="store_true", help="list entries and what they cost on this machine")
    parser.add_argument(
        "--yes", action="store_true", help="start without asking, even if it takes many GPU hours or days"
    )
    options = parser.parse_args(argv)
    if not options.names and not options.list:
        parser.error(
            "give names of entries, for example: merit reproduce fig4; or merit reproduce all; or --list"
        )
    return options


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too few; at least 1 is needed")
    return value


def _default_jobs() -> int:
    """One process for each core: a small model does not keep two busy. With GPUs, use torchrun."""
    ranks = Ranks.join()
    return 1 if ranks.size > 1 or ranks.device.type == "cuda" else min(os.cpu_count() or 1, _MAX_JOBS)


def _corpus(scale: Scale, options: argparse.Namespace, folder: Path) -> Corpus:
    """The data to train on; with --no-training, those of the runs in the folder."""
    known = Corpus.recall(folder)
    if options.no_training and options.data is None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give the folder of the runs with --out")
        if known is None:
            raise ValueError(f"the data of the runs in {folder} are not known; give them with --data")
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
    seeds: int | None
    folder: Path
    corpus: Corpus | None

    @classmethod
    def of(cls, scale: Scale, options: argparse.Namespace, folder: Path) -> _Costs:
        """Those of the command's options."""
        corpus = Corpus.recall(folder) if options.data is None else Corpus.of(Dataset.open(options.data))
        return cls(scale, options.seeds, folder, corpus)

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
        queries = [(entry.num_seeds(self.scale, self.seeds), entry.runs) for entry in entries]
        planned = [one for seeds, runs in queries for one in plan(runs, self.scale, seeds)]
        planned = list({one.config.fingerprint: one for one in planned}.values())
        if self.corpus is None or not planned:
            return Cost.of((one.config, 0) for one in planned)
        trials = self.found.trials(planned, self.folder, self.corpus)
        data = self.found.data(planned, trials, self.corpus)
        return Cost.of((run.config, self._steps_done(run)) for run in data.all)

    @staticmethod
    def _steps_done(run: OneRun) -> int:
        """All steps of a run that ended: one that diverged is not repeated either."""
        is_over = run.row["status"] in ("finished", "diverged")
        return (run.config.steps or 0) if is_over else (run.row["last_step"] or 0)

    def show(self, entries: Sequence[Entry]) -> None:
        """Print the list of entries with their costs."""
        from rich.console import Console
        from rich.table import Table

        console, speed = Console(highlight=False), self.speed
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("Name", no_wrap=True)
        table.add_column("What it shows")
        for head in ("Runs", "Left", "Tokens", "FLOPs", "GPU hours" if speed.num_gpus else "Time"):
            table.add_column(head, justify="right", no_wrap=True)

        def add(name: str, shows: str, counted: Sequence[Entry]) -> None:
            of_these = self.of_entries(counted)
            hours, seconds = of_these.gpu_hours(speed), of_these.seconds(speed)
            spent = f"{hours:,.2f}" if speed.num_gpus else duration(seconds)
            counts = str(of_these.num_runs), str(of_these.num_left)
            table.add_row(name, shows, *counts, amount(of_these.tokens), f"{of_these.flops:.1e}", spent)

        for entry in entries:
            add(entry.name, entry.shows, [entry])
        if len(entries) > 1:
            table.add_section()
            add("together", "runs that entries share counted once", entries)
        console.print(f"scale {self.scale.name}: {self.scale.summary}\n", markup=False, soft_wrap=True)
        console.print(table)
        deducted = f"training already done in {self.folder} is deducted"
        if self.corpus is None and (self.folder / "runs").is_dir():
            deducted = f"give --data to deduct training already done in {self.folder}"
        console.print(
            f"\nTraining only; {deducted}. Speed: {speed.flops / 1e12:.3g} TFLOP/s, {speed.source}.",
            markup=False,
            soft_wrap=True,
        )


def _agreed(entries: Sequence[Entry], scale: Scale, options: argparse.Namespace, folder: Path) -> bool:
    """Whether to start. If it takes many GPU hours or days, show the cost and ask."""
    ranks, costs = Ranks.join(), _Costs.of(scale, options, folder)
    if not scale.is_large and not ranks.first(lambda: _takes_days(costs, entries)):
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


def _takes_days(costs: _Costs, entries: Sequence[Entry]) -> bool:
    """Whether the rest would take this machine more than a day, as a GPU's scale does on a CPU."""
    of_these = costs.of_entries(entries)
    return of_these.flops >= _SMALL_COST and of_these.seconds(costs.speed) > _DAY


def _print_verdicts(verdicts: Sequence[dict[str, Any]], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"holds": "green", "does not hold": "red", "not decided": "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Entry", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Claim")
    for entry in verdicts:
        lines = [(claim["outcome"], claim["claim"]) for claim in entry.get("verdicts", [])]
        for place, (outcome, claim) in enumerate(lines or [("not run", entry.get("missing", ""))]):
            name = entry["entry"] if place == 0 else ""
            table.add_row(name, Text(outcome, style=colours.get(outcome, "dim")), Text(claim))
    Console(highlight=False).print(table)
    print(f"\n{tally(verdicts)}\nThe page: {folder / 'index.html'}")
