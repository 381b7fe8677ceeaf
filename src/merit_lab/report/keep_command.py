"""`merit keep`: what runs recorded, small enough for version control."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.record import Run, write_excerpt
from merit_lab.report.gather import find_folders


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit keep",
        description="Copy what runs recorded into small run directories, to be kept with code or a paper: "
        "numbers with five digits, at most 50 of the training steps and 64 of the statistics of updates, no "
        "checkpoints and no paths. `merit report` and `merit reproduce` read them as they read the runs. "
        "Runs that are there already stay as they are.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    parser.add_argument("--out", type=Path, required=True, help="folder to write them into")
    options = parser.parse_args(argv)
    num_written = num_there = num_left = 0
    try:
        for folder in find_folders(options.runs):
            run, target = Run.open(folder), options.out / folder.name
            if (target / "config.json").exists():
                _check_same(run, Run.open(target))
                num_there += 1
            elif run.status not in ("finished", "diverged"):
                num_left += 1
                print(f"{folder} is {run.status} and is left out", file=sys.stderr)
            else:
                write_excerpt(run, target)
                num_written += 1
    except (OSError, ValueError) as error:
        print(f"merit keep: {error}", file=sys.stderr)
        return 1
    print(f"{num_written} written to {options.out}, {num_there} there already, {num_left} left out")
    return 0


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
            f"{begun[0]} and {begun[1]}); remove the former to keep the latter, or choose another folder "
            "with --out"
        )
