"""`merit keep`: copy the records of runs into a file small enough for version control."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.results.gather import MeasuredRun, find_folders, say_what_is_left_out
from merit_lab.runs import OVER, Run, archive, archive_of, durable, excerpt
from merit_lab.runs.excerpt import without_paths


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit keep",
        description="Copy the records of runs into one small file, to keep with code or a paper: numbers "
        "with five digits, at most 50 training steps and 64 statistics of updates, no checkpoints and no "
        "paths. `merit report` and `merit reproduce` read it as they read the runs, and `merit show` shows "
        "it. Results of `merit evaluate` are copied beside it, to evaluate/RUN. Runs that are in the file "
        "already are left unchanged, until --remove names them.",
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run directories, or folders of them, also nested")
    parser.add_argument("--out", type=Path, required=True, help="folder of the file, runs.parquet")
    parser.add_argument("--remove", nargs="+", metavar="NAME", help="remove runs from the file, by name")
    options = parser.parse_args(argv)
    if bool(options.runs) == bool(options.remove):
        parser.error("give the runs to keep, or with --remove the names of those to remove")
    try:
        file = archive_of(options.out)
        if options.remove:
            _remove(options.remove, file)
        else:
            say_what_is_left_out("merit keep", options.runs)
            _keep(options.runs, file)
    except (OSError, ValueError) as error:
        print(f"merit keep: {error}", file=sys.stderr)
        return 1
    return 0


def _keep(paths: Sequence[Path], file: Path) -> None:
    kept_before = set(archive.names_in(file)) if file.is_file() else set()
    new: dict[str, Run] = {}
    runs = [Run.open(folder) for folder in find_folders(paths)]
    num_there = num_left = 0
    for run in runs:
        if run.name in kept_before or run.name in new:
            _check_same(run, new.get(run.name) or Run.open(file / run.name))
            num_there += 1
        elif (status := MeasuredRun.read(run).status) in OVER:
            new[run.name] = run
        else:
            num_left += 1
            print(f"{run.folder} is {status} and is left out", file=sys.stderr)
    if new:
        archive.add(file, map(excerpt, new.values()))
    for run in runs:
        if run.name in kept_before or run.name in new:
            _keep_evaluations(run, file.parent)
    print(f"{len(new)} written to {file}, {num_there} there already, {num_left} left out")


def _keep_evaluations(run: Run, out: Path) -> None:
    """Copy what `merit evaluate` wrote; a run that is kept already may have been evaluated since."""
    for source in sorted(run.evaluations.rglob("*.json")):
        copy = out / "evaluate" / run.name / source.relative_to(run.evaluations)
        try:
            result = json.loads(source.read_text(encoding="utf-8"))
            result["environment"] = without_paths(result["environment"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{source} is not a result of `merit evaluate` ({error!r}); remove it, and keep again"
            ) from None
        copy.parent.mkdir(parents=True, exist_ok=True)
        durable.write(copy, json.dumps(result, indent=2) + "\n")


def _remove(names: Sequence[str], file: Path) -> None:
    archive.remove(file, names)
    for name in names:
        shutil.rmtree(file.parent / "evaluate" / name, ignore_errors=True)
    left = f"{len(archive.names_in(file))} left" if file.is_file() else "none left, so the file was deleted"
    print(f"{len(set(names))} removed from {file}, {left}")


def _check_same(run: Run, kept: Run) -> None:
    """Refuse a different run with the same name, which would otherwise be dropped silently."""

    def identity(one: Run) -> tuple[object, ...]:
        return {**one.config, "data": None}, one.environment.get("data", {}).get("fingerprint")

    if identity(run) != identity(kept):
        raise ValueError(
            f"{kept.folder} and {run.folder} are different runs with the same name; choose another folder "
            "with --out for one of them"
        )
    started = [one.environment.get("started") for one in (kept, run)]
    if started[0] != started[1]:
        raise ValueError(
            f"{kept.folder} and {run.folder} are different runs with the same name and settings (started at "
            f"{started[0]} and {started[1]}); choose another folder with --out for one of them"
        )
