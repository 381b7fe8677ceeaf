"""`merit keep`: copy the records of runs into a file small enough for version control."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from merit_lab.runs import archive, find, table
from merit_lab.runs.archive import Head
from merit_lab.runs.run import OVER


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit keep",
        description="Copy the records of runs that are over into one small file, to keep with code or a "
        "paper: fewer digits and points of long curves, what was measured of them, no checkpoints and no "
        "paths. All commands read it as they read the runs. Runs that are in the file already are left "
        "unchanged.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them, also nested")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file, runs.parquet")
    options = parser.parse_args(argv)
    try:
        find.say_what_is_left_out("merit keep", options.runs)
        keep(options.runs, find.archive_of(options.out))
    except (OSError, ValueError) as error:
        print(f"merit keep: {error}", file=sys.stderr)
        return 1
    return 0


def keep(folders: Sequence[Path], file: Path) -> None:
    """Add the runs in folders to a file, and print how many are new."""
    there = {head.name: head for head in archive.read(file)[0]} if file.is_file() else {}
    new: dict[str, Head] = {}
    frames, num_there, num_left = [], 0, 0
    for heads, steps in table.sources(folders):
        names = []
        for head in heads:
            if known := there.get(head.name) or new.get(head.name):
                _check_same(known, head)
                num_there += 1
            elif head.status in OVER:
                new[head.name] = head
                names.append(head.name)
            else:
                num_left += 1
                print(f"{head.folder} is {head.status} and is left out", file=sys.stderr)
        frames.append(steps.filter(pl.col("run").is_in(names)))
    if new:
        archive.add(file, new.values(), pl.concat(frames))
    print(f"{len(new)} written to {file}, {num_there} there already, {num_left} left out")


def _check_same(known: Head, head: Head) -> None:
    """Refuse a different run of the same name, which would otherwise be dropped in silence."""
    for what, first, second in (
        ("settings", {**known.config, "data": None}, {**head.config, "data": None}),
        ("data", *(one.environment.get("data", {}).get("fingerprint") for one in (known, head))),
        ("times of starting", *(one.environment.get("started") for one in (known, head))),
    ):
        if first != second:
            raise ValueError(
                f"{known.folder} and {head.folder} are runs of the same name with different {what}; choose "
                "another folder with --out for one of them"
            )
