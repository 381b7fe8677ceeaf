"""Find runs: in run directories, and kept together in files.

A folder's runs are the directories in it and in its folder ``runs``, and those kept in its runs.parquet. If
there are any, it stands for these alone; otherwise for the runs of the folders below it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ARCHIVE = "runs.parquet"


class Place(NamedTuple):
    """Runs that belong together: directories, and the file of those that are kept."""

    directories: list[Path]
    archive: Path | None


def places(path: Path) -> list[Place]:
    """Return where the runs at a path are: a run, a file of runs, or a folder of runs, at any depth."""
    if path.is_file():
        return [Place([], path)]
    if is_run_directory(path):
        return [Place([path], None)]
    if (own := _own(path)) is not None:
        return [own]
    return [place for folder in _folders_in(path) for place in places(folder)]


def say_what_is_left_out(command: str, folders: Iterable[Path]) -> None:
    """Say on standard error which folders below those given have runs that are not read."""
    for folder in folders:
        if is_run_directory(folder) or _own(folder) is None:
            continue
        below = [one for one in _folders_in(folder) if one.name != "runs" and not is_run_directory(one)]
        if with_runs := [one for one in below if places(one)]:
            names = f"{with_runs[0]}{' and other folders' if len(with_runs) > 1 else ''}"
            print(
                f"{command}: {folder} stands for the runs in it; those in {names} are left out, unless they "
                "are named too",
                file=sys.stderr,
            )


def archive_of(folder: Path) -> Path:
    """Return the file of a folder's runs: in the folder, or next to it if it is called ``runs``."""
    if folder.suffix == ".parquet":
        return folder
    if not folder.name:  # the current one
        folder = folder.absolute()
    return (folder.parent if folder.name == "runs" else folder) / ARCHIVE


def is_run_directory(folder: Path) -> bool:
    """Whether a folder is a run directory. An exported model has a config.json too."""
    others = ("environment.json", "metrics.jsonl")
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in others)


def _own(folder: Path) -> Place | None:
    """The runs of a folder itself; None if it has none."""
    below = [*_folders_in(folder), *_folders_in(folder / "runs")]
    directories = sorted(one for one in below if is_run_directory(one))
    archive = archive_of(folder)
    if not directories and not archive.is_file():
        return None
    return Place(directories, archive if archive.is_file() else None)


def _folders_in(path: Path) -> list[Path]:
    """The visible folders in a folder, without links to others than runs; none if it is no folder."""
    if not path.is_dir():
        return []
    below = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    return sorted(folder for folder in below if not folder.is_symlink() or is_run_directory(folder))
