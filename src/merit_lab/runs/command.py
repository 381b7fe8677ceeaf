"""`merit runs`: list runs, or write them as two tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from merit_lab.folders import check_writable
from merit_lab.json_values import encode
from merit_lab.runs import archive, durable, find, table
from merit_lab.tables import NOTHING, Table, print_table

_WRITERS: Mapping[str, Callable[[pl.DataFrame, Path], object]] = {
    "csv": lambda frame, path: table.flat(frame).write_csv(path),
    "parquet": lambda frame, path: frame.write_parquet(path),
    "json": lambda frame, path: path.write_text(
        "".join(f"{encode(row)}\n" for row in frame.iter_rows(named=True)), encoding="utf-8"
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit runs",
        description="List runs with their status, last step and last validation loss, or write all that they "
        "recorded as two tables: runs (a row a run: settings, environment, outcome) and steps (a row a "
        "logged step).",
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, help="run directories, folders of runs, also nested, or kept runs"
    )
    for name, what in (
        ("csv", "runs.csv and steps.csv"),
        ("parquet", "runs.parquet and steps.parquet"),
        ("json", "runs.jsonl and steps.jsonl, with a JSON object a line"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"write {what} to this folder")
    options = parser.parse_args(argv)
    try:
        find.say_what_is_left_out("merit runs", options.folders)
        read = table.read(*options.folders)
        wanted = {name: folder for name in _WRITERS if (folder := getattr(options, name)) is not None}
        for name, folder in wanted.items():
            _write(read, name, folder)
        if not wanted:
            print_table(_listed(read.runs))
    except (OSError, ValueError) as error:
        print(f"merit runs: {error}", file=sys.stderr)
        return 1
    return 0


def _write(read: table.Table, name: str, folder: Path) -> None:
    if any(
        place.directories or archive.hash_path(find.archive_of(folder)).exists()
        for place in find.places(folder)
    ):
        raise ValueError(
            f"{folder} holds runs itself; choose another folder, where runs.{name} is not taken for one"
        )
    check_writable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for what, frame in read._asdict().items():
        path = folder / f"{what}.{'jsonl' if name == 'json' else name}"
        with durable.replacing(path) as partial:
            _WRITERS[name](frame, partial)
        print(f"{frame.height} {what} written to {path}")


def _listed(runs: pl.DataFrame) -> Table:
    rows = [
        (name, status, f"{step:,}", NOTHING if loss is None else f"{loss:.4g}")
        for name, status, step, loss in runs.select("run", "status", "last_step", "validation_loss")
        .sort("run")
        .iter_rows()
    ]
    return Table(("Run", "Status", "Last step", "Validation loss"), tuple(rows), num_text=2)
