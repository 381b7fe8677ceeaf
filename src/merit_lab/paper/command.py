"""`merit reproduce`: reproduce figures and tables of the paper, with verdicts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merit_lab.data import Dataset
from merit_lab.data.command import make
from merit_lab.folders import refuse_file
from merit_lab.paper.corpus import CorpusIdentity, recall, remember
from merit_lab.paper.cost import cost_of, find_speed
from merit_lab.paper.entry import PaperEntry
from merit_lab.paper.registry import ENTRIES, choose
from merit_lab.paper.scales import SCALES
from merit_lab.paper.setups import Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.paper.write import check_scale, tally
from merit_lab.study.command import exit_status
from merit_lab.study.cost import duration
from merit_lab.text import amount
from merit_lab.train.parallel import Ranks

_MAX_JOBS = 8
_DAY = 86400.0  # seconds
_SMALL_COST = 1e15  # FLOPs: hours on a slow core, so there is no need to measure the speed
_OTHER_FOLDER = "another folder with --out"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells do."""
    options = _parse(argv)
    scale = SCALES[options.scale]
    folder = options.out or Path("runs", f"reproduce-{scale.name}")

    def work() -> int:
        entries = choose(options.names or ["all"])
        if options.list:
            _print_costs(entries, scale, options, folder)
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


def _corpus(scale: Scale, options: argparse.Namespace, folder: Path) -> CorpusIdentity:
    """The data to train on; with --no-training, those of the runs in the folder."""
    if options.no_training:
        return _corpus_of_runs(folder, options.data)
    dataset = _data(scale, options.data)
    _check_same(dataset, recall(folder), folder, f"give theirs with --data, or choose {_OTHER_FOLDER}")
    if Ranks.join().is_first:
        remember(dataset, folder)
    return dataset


def _known_corpus(options: argparse.Namespace, folder: Path) -> CorpusIdentity | None:
    """The data of --data, or of the runs in the folder; None if there are neither."""
    return recall(folder) if options.data is None else Dataset.open(options.data)


def _corpus_of_runs(folder: Path, data: Path | None) -> CorpusIdentity:
    known = recall(folder)
    if data is None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give the folder of the runs with --out")
        if known is None:
            raise ValueError(f"the data of the runs in {folder} are not known; give them with --data")
        return known
    dataset = Dataset.open(data)
    way_out = f"leave out --data to use these runs, or choose {_OTHER_FOLDER}"
    _check_same(dataset, known, folder, way_out)
    return dataset


def _check_same(dataset: Dataset, known: CorpusIdentity | None, folder: Path, way_out: str) -> None:
    """Refuse other data: the overview and data.json of a folder cannot tell two corpora apart."""
    if known is not None and known.fingerprint != dataset.fingerprint:
        raise ValueError(
            f"{dataset.folder} is not the data of the runs in {folder}: its fingerprint is "
            f"{dataset.fingerprint}, that of their data ({known.folder.name}) {known.fingerprint}; {way_out}"
        )


def _embedded(scale: Scale) -> Path:
    """The folder for the text that every machine has."""
    return Path("data", "embedded" if scale.tokenizer == "bytes" else f"embedded-{scale.tokenizer}")


def _data(scale: Scale, folder: Path | None) -> Dataset:
    """The data of --data, or the text that every machine has, prepared if it is missing."""
    if folder is None:
        if not scale.makes_data:
            raise ValueError(
                f"scale {scale.name} needs --data: a folder that `merit prepare openwebtext` wrote (for "
                "figure 6, `merit prepare c4`, and a separate --out)"
            )
        folder = _embedded(scale)
        if status := Ranks.join().first(lambda: make("embedded", folder, str(scale.tokenizer))):
            raise ValueError(f"the data could not be prepared (status {status}); give some with --data")
    return Dataset.open(folder)


def _print_costs(
    entries: Sequence[PaperEntry], scale: Scale, options: argparse.Namespace, folder: Path
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    runs, corpus = folder / "runs", _known_corpus(options, folder)
    speed = find_speed(scale)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Name", no_wrap=True)
    table.add_column("What it shows")
    for head in ("Runs", "Left", "Tokens", "FLOPs", "GPU hours" if speed.num_gpus else "Time"):
        table.add_column(head, justify="right", no_wrap=True)

    def add(name: str, shows: str, counted: Sequence[PaperEntry]) -> None:
        cost = cost_of(counted, scale, options.seeds, folder=runs, corpus=corpus)
        spent = f"{cost.gpu_hours(speed):,.2f}" if speed.num_gpus else duration(cost.seconds(speed))
        counts = str(cost.num_runs), str(cost.num_left)
        table.add_row(name, shows, *counts, amount(cost.tokens), f"{cost.flops:.1e}", spent)

    for entry in entries:
        add(entry.name, entry.shows, [entry])
    if len(entries) > 1:
        table.add_section()
        add("together", "runs that entries share counted once", entries)
    console.print(f"scale {scale.name}: {scale.summary}\n", markup=False, soft_wrap=True)
    console.print(table)
    deducted = f"training already done in {folder} is deducted"
    if runs.is_dir() and corpus is None:
        deducted = f"give --data to deduct training already done in {folder}"
    console.print(
        f"\nTraining only; {deducted}. Speed: {speed.flops / 1e12:.3g} TFLOP/s, {speed.source}.",
        markup=False,
        soft_wrap=True,
    )


def _agreed(entries: Sequence[PaperEntry], scale: Scale, options: argparse.Namespace, folder: Path) -> bool:
    """Whether to start. If it takes many GPU hours or days, show the cost and ask."""
    ranks = Ranks.join()
    if not scale.is_large and not ranks.first(lambda: _takes_days(entries, scale, options, folder)):
        return True
    if ranks.is_first:
        _print_costs(entries, scale, options, folder)
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


def _takes_days(
    entries: Sequence[PaperEntry], scale: Scale, options: argparse.Namespace, folder: Path
) -> bool:
    """Whether the rest would take this machine more than a day, as a GPU's scale does on a CPU."""
    corpus = _known_corpus(options, folder)
    cost = cost_of(entries, scale, options.seeds, folder=folder / "runs", corpus=corpus)
    if cost.flops < _SMALL_COST:
        return False
    return cost.seconds(find_speed(scale)) > _DAY


def _print_verdicts(verdicts: Sequence[dict[str, Any]], folder: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"held": "green", "contradicted": "red", "undecided": "yellow"}
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
