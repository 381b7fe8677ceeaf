"""`merit keep`: what runs recorded, in a file small enough for version control."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.record import Run, archive, archive_of, excerpt
from merit_lab.report.gather import find_folders


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit keep",
        description="Copy what runs recorded into one small file, to be kept with code or a paper: numbers "
        "with five digits, at most 50 of the training steps and 64 of the statistics of updates, no "
        "checkpoints and no paths. `merit report` and `merit reproduce` read it as they read the runs, and "
        "`merit show` shows it. Runs that are there already stay as they are, until --remove names them.",
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run directories, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file, runs.parquet")
    parser.add_argument("--remove", nargs="+", metavar="NAME", help="take runs out of the file, by name")
    options = parser.parse_args(argv)
    if bool(options.runs) == bool(options.remove):
        parser.error("give the runs to be kept, or with --remove the names of those to be kept no longer")
    try:
        file = archive_of(options.out)
        if options.remove:
            _remove(options.remove, file)
        else:
            _keep(options.runs, file)
    except (OSError, ValueError) as error:
        print(f"merit keep: {error}", file=sys.stderr)
        return 1
    return 0


def _keep(paths: Sequence[Path], file: Path) -> None:
    there = set(archive.names_in(file)) if file.is_file() else set()
    new: dict[str, Run] = {}
    num_there = num_left = 0
    for folder in find_folders(paths):
        run = Run.open(folder)
        if run.name in there or run.name in new:
            _check_same(run, new.get(run.name) or Run.open(file / run.name))
            num_there += 1
        elif run.status in ("finished", "diverged"):
            new[run.name] = run
        else:
            num_left += 1
            print(f"{folder} is {run.status} and is left out", file=sys.stderr)
    if new:
        archive.add(file, map(excerpt, new.values()))
    print(f"{len(new)} written to {file}, {num_there} there already, {num_left} left out")


def _remove(names: Sequence[str], file: Path) -> None:
    archive.remove(file, names)
    left = f"{len(archive.names_in(file))} left" if file.is_file() else "none left, so the file is gone"
    print(f"{len(set(names))} removed from {file}, {left}")


def _check_same(run: Run, kept: Run) -> None:
    """Two runs may have one name; the second would be lost without a word."""

    def settings(own: Run) -> tuple[object, ...]:
        return {**own.config, "data": None}, own.environment.get("data", {}).get("fingerprint")

    if settings(run) != settings(kept):
        raise ValueError(
            f"{kept.folder} is another run than {run.folder}, which has the same name; choose another folder "
            "with --out for one of them"
        )
    begun = [own.environment.get("started") for own in (kept, run)]
    if begun[0] != begun[1]:
        raise ValueError(
            f"{kept.folder} is another run than {run.folder}, which has the same name and settings (begun at "
            f"{begun[0]} and {begun[1]}); choose another folder with --out for one of them"
        )
