"""`merit reproduce`: figures and tables of the paper, with verdicts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from merit_lab.data import Dataset
from merit_lab.data.command import make
from merit_lab.reproduce.corpus import Corpus, recall, remember
from merit_lab.reproduce.cost import cost_of, find_speed
from merit_lab.reproduce.entry import Entry
from merit_lab.reproduce.registry import ENTRIES, choose
from merit_lab.reproduce.scale import Scale
from merit_lab.reproduce.scales import SCALES
from merit_lab.reproduce.work import Task, reproduce
from merit_lab.reproduce.write import check_scale, tally
from merit_lab.study.command import exit_status
from merit_lab.study.cost import amount, duration
from merit_lab.train.parallel import Ranks

_MOST_JOBS = 8
_DAY = 86400.0  # seconds
_LITTLE = 1e15  # operations: hours on a slow core, which need no measuring
_ANOTHER = "another folder with --out"


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells have it."""
    options = _parse(argv)
    scale = SCALES[options.scale]
    folder = options.out or Path("runs", f"reproduce-{scale.name}")

    def work() -> int:
        entries = choose(options.names or ["all"])
        if options.list:
            _print_costs(entries, scale, options, folder)
            return 0
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
        said = reproduce(task)
        if Ranks.join().is_first:
            _print_verdicts(said, folder)
        return 0

    return exit_status("merit reproduce", work)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(f"  {entry.name:<10} {entry.shows}" for entry in ENTRIES.values())
    scales = "\n".join(f"  {scale.name:<10} {scale.summary}" for scale in SCALES.values())
    parser = argparse.ArgumentParser(
        prog="merit reproduce",
        description="Make figures and tables of the MERIT paper again, each with a verdict: whether what the "
        "paper says held here.\nWhat is missing is run, what is there is used; a call that was stopped goes "
        f"on when it is repeated.\n\nnames:\n  all        all of these\n{names}\n\nscales:\n{scales}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to make")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="what is trained (%(default)s)")
    parser.add_argument("--data", type=Path, help="token files, as `merit prepare` writes them")
    parser.add_argument("--seeds", type=_count, help="seeds of every run; else the scale's own")
    parser.add_argument("--out", type=Path, help="folder of runs and pages (runs/reproduce-SCALE)")
    parser.add_argument(
        "--task-files", type=Path, help="evaluation sets for fig5, fig12 and table1 (see `merit evaluate -h`)"
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        help="runs at a time, on cores or GPUs, which they share if there are fewer; else one for each core",
    )
    parser.add_argument(
        "--no-training",
        action="store_true",
        help="make what can be made of the runs that are there; needs no data",
    )
    parser.add_argument("--list", action="store_true", help="show what there is and what it costs here")
    parser.add_argument(
        "--yes", action="store_true", help="start what takes many GPU hours, or days, without asking"
    )
    options = parser.parse_args(argv)
    if not options.names and not options.list:
        parser.error("say what to make, for example: merit reproduce fig4; or merit reproduce all; or --list")
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
    """A process for each core: a small model does not keep two busy. GPUs are left to torchrun."""
    return 1 if Ranks.join().device.type == "cuda" else min(os.cpu_count() or 1, _MOST_JOBS)


def _corpus(scale: Scale, options: argparse.Namespace, folder: Path) -> Corpus:
    """The data to train on; where nothing is trained, those that the runs in the folder are of."""
    if options.no_training:
        return _corpus_of_runs(folder, options.data)
    dataset = _data(scale, options.data)
    _check_same(dataset, recall(folder), folder, f"give those with --data, or choose {_ANOTHER}")
    if Ranks.join().is_first:
        remember(dataset, folder)
    return dataset


def _known_corpus(options: argparse.Namespace, folder: Path) -> Corpus | None:
    """The data given, or those of the runs in the folder; None where there are none of either yet."""
    return recall(folder) if options.data is None else Dataset.open(options.data)


def _corpus_of_runs(folder: Path, given: Path | None) -> Corpus:
    known = recall(folder)
    if given is None:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; name that of the runs with --out")
        if known is None:
            raise ValueError(f"what data the runs in {folder} are of is not known; name them with --data")
        return known
    dataset = Dataset.open(given)
    way_out = f"leave --data out to make entries of these runs, or name {_ANOTHER}"
    _check_same(dataset, known, folder, way_out)
    return dataset


def _check_same(dataset: Dataset, known: Corpus | None, folder: Path, way_out: str) -> None:
    """All entries of a folder are of one corpus: its overview and its data.json could not tell them apart."""
    if known is not None and known.fingerprint != dataset.fingerprint:
        raise ValueError(
            f"{dataset.folder} holds other data than the runs in {folder} are of: its fingerprint is "
            f"{dataset.fingerprint}, that of their data, {known.folder.name}, {known.fingerprint}; {way_out}"
        )


def _embedded(scale: Scale) -> Path:
    """Where a corpus that every machine has goes."""
    return Path("data", "embedded" if scale.tokenizer == "bytes" else f"embedded-{scale.tokenizer}")


def _data(scale: Scale, folder: Path | None) -> Dataset:
    """The data given, or a corpus that every machine has, made where it is missing."""
    if folder is None:
        if not scale.makes_data:
            raise ValueError(
                f"scale {scale.name} needs --data: a folder that `merit prepare openwebtext` wrote (for "
                "figure 6, `merit prepare c4`, and an --out of its own)"
            )
        folder = _embedded(scale)
        if status := Ranks.join().first(lambda: make("embedded", folder, str(scale.tokenizer))):
            raise ValueError(f"the data could not be made (status {status}); give some with --data")
    return Dataset.open(folder)


def _print_costs(entries: Sequence[Entry], scale: Scale, options: argparse.Namespace, folder: Path) -> None:
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

    def add(name: str, shows: str, some: Sequence[Entry]) -> None:
        cost = cost_of(some, scale, options.seeds, folder=runs, corpus=corpus)
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
    deducted = f"what is done in {folder} is deducted"
    if runs.is_dir() and corpus is None:
        deducted = f"give --data to have what is done in {folder} deducted"
    console.print(
        f"\nTraining alone; {deducted}. Speed: {speed.flops / 1e12:.3g} TFLOP/s, {speed.source}.",
        markup=False,
        soft_wrap=True,
    )


def _agreed(entries: Sequence[Entry], scale: Scale, options: argparse.Namespace, folder: Path) -> bool:
    """Whether to start; of what takes many GPU hours, or days, the cost is shown first."""
    ranks = Ranks.join()
    if not scale.is_large and not ranks.first(lambda: _takes_days(entries, scale, options, folder)):
        return True
    if ranks.is_first:
        _print_costs(entries, scale, options, folder)
    if options.yes:
        return True
    if ranks.size > 1 or not sys.stdin.isatty():
        print("merit reproduce: pass --yes to start this", file=sys.stderr)
        return False
    return input("Start? [y/N] ").strip().lower() in ("y", "yes")


def _takes_days(entries: Sequence[Entry], scale: Scale, options: argparse.Namespace, folder: Path) -> bool:
    """Whether this machine is too slow for what is left: a GPU's scale on a CPU."""
    corpus = _known_corpus(options, folder)
    cost = cost_of(entries, scale, options.seeds, folder=folder / "runs", corpus=corpus)
    if cost.flops < _LITTLE:
        return False
    return cost.seconds(find_speed(scale)) > _DAY


def _print_verdicts(said: Sequence[dict[str, Any]], folder: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"held": "green", "contradicted": "red", "undecided": "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("Entry", no_wrap=True)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Claim")
    for own in said:
        lines = [(one["outcome"], one["claim"]) for one in own.get("verdicts", [])]
        for place, (outcome, claim) in enumerate(lines or [("not run", own.get("missing", ""))]):
            name = own["entry"] if place == 0 else ""
            table.add_row(name, Text(outcome, style=colours.get(outcome, "dim")), Text(claim))
    Console(highlight=False).print(table)
    print(f"\n{tally(said)}\nThe page: {folder / 'index.html'}")
