"""Where runs are: in directories of their own, or kept together in a file.

A run that is kept has a path too, FILE/NAME. It is also found under the path that its directory would have,
in the folder of the file or in the folder ``runs`` beside it; a directory that is there goes before it.
"""

from __future__ import annotations

from pathlib import Path

ARCHIVE = "runs.parquet"


def archive_of(folder: Path) -> Path:
    """The file of a folder's runs: in the folder, or beside it where it is called ``runs``."""
    if folder.suffix == ".parquet":
        return folder
    if not folder.name:  # the current one
        folder = folder.absolute()
    return (folder.parent if folder.name == "runs" else folder) / ARCHIVE


def kept_path(folder: Path) -> Path | None:
    """The path of a run in its file, given it or that of the run's directory; None where it is not kept."""
    archive = archive_of(folder.parent)
    return archive / folder.name if folder.name in _names(archive) else None


def run_folders(path: Path) -> list[Path]:
    """The paths of the runs at a path: that of a run, of a folder that holds some, or of a file of them."""
    if is_run_directory(path) or kept_path(path):
        return [path]
    folders = {name: archive_of(path) / name for name in _names(archive_of(path))}
    if path.is_dir():
        folders |= {own.name: own for own in path.iterdir() if is_run_directory(own)}
    return [folders[name] for name in sorted(folders)]


def is_run_directory(folder: Path) -> bool:
    """Whether a folder is a run's own. An exported model has a config.json too."""
    others = ("environment.json", "metrics.jsonl")
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in others)


def _names(archive: Path) -> list[str]:
    if not archive.is_file():
        return []
    from merit_lab.record.archive import names_in  # pyarrow is not needed to train

    return names_in(archive)
