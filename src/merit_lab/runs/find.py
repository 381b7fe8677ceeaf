"""Find runs: in run directories, or kept together in a file.

A kept run has the path FILE/NAME. It is also found under the path that its directory would have, in the
folder of the file or in the folder ``runs`` next to it; an existing directory takes precedence.
"""

from __future__ import annotations

from pathlib import Path

ARCHIVE = "runs.parquet"


def archive_of(folder: Path) -> Path:
    """Return the file of a folder's runs: in the folder, or next to it if it is called ``runs``."""
    if folder.suffix == ".parquet":
        return folder
    if not folder.name:  # the current one
        folder = folder.absolute()
    return (folder.parent if folder.name == "runs" else folder) / ARCHIVE


def kept_path(folder: Path) -> Path | None:
    """Return the path of a run in its file, given that path or its directory; None if it is not kept."""
    archive = archive_of(folder.parent)
    return archive / folder.name if folder.name in _names(archive) else None


def run_folders(path: Path) -> list[Path]:
    """Return the paths of the runs at a path: a run, a folder of runs, or a file of runs."""
    if is_run_directory(path) or kept_path(path):
        return [path]
    folders = {name: archive_of(path) / name for name in _names(archive_of(path))}
    if path.is_dir():
        folders |= {folder.name: folder for folder in path.iterdir() if is_run_directory(folder)}
    return [folders[name] for name in sorted(folders)]


def nested_run_folders(path: Path) -> list[Path]:
    """Return the paths of the runs at a path; for a folder without any, those in the folders below it."""
    runs = run_folders(path)
    if runs or not path.is_dir():
        return runs
    return [run for folder in _folders_in(path) for run in nested_run_folders(folder)]


def folders_left_out(path: Path) -> list[Path]:
    """Return the folders with runs in a folder that has runs itself, and so stands for these alone."""
    if is_run_directory(path) or not path.is_dir() or not run_folders(path):
        return []
    return [
        folder
        for folder in _folders_in(path)
        if not is_run_directory(folder) and folder.name != "runs" and nested_run_folders(folder)
    ]


def _folders_in(path: Path) -> list[Path]:
    """Return the visible folders in a folder."""
    below = [folder for folder in path.iterdir() if folder.is_dir() and not folder.is_symlink()]
    return sorted(folder for folder in below if not folder.name.startswith("."))


def is_run_directory(folder: Path) -> bool:
    """Whether a folder is a run directory. An exported model has a config.json too."""
    others = ("environment.json", "metrics.jsonl")
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in others)


def _names(archive: Path) -> list[str]:
    if not archive.is_file():
        return []
    from merit_lab.runs.archive import names_in  # pyarrow is not needed to train

    return names_in(archive)
