"""Kept runs as if they were directories: FILE/NAME, or where their directory would be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from merit_lab.runs.find import archive_of, is_run_directory, left_out, places


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
    found: list[Path] = []
    if kept_path(path):
        return [path]
    for place in places(path):
        folders = {folder.name: folder for folder in place.directories}
        if place.archive is not None:
            folders = {name: place.archive / name for name in _names(place.archive)} | folders
        found += [folders[name] for name in sorted(folders)]
    return found


folders_left_out = left_out


def head_of(path: Path) -> Any:
    """The head of a kept run."""
    return next(head for head in _load(path.parent)[0] if head.name == path.name)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a kept run."""
    for row in _load(path.parent)[1].get(path.name, []):
        step = row["step"]
        events = [{"kind": "event", "step": step, **event} for event in row["events"] or ()]
        yield from (event for event in events if event["what"] in ("started", "resumed"))
        if row["training_loss"] is not None:
            names = ("grad_norm", "weight_norm", "lr", "tokens", "seconds", "tokens_per_second")
            more = ("optimizer_share", "mfu", "memory_gib")
            values = {name: row[name] for name in (*names, *more)}
            yield {"kind": "train", "step": step, "loss": row["training_loss"], **values}
        if row["max_logit"] is not None:
            # Those of single heads have fewer digits than the largest.
            logits, most = row["max_logits"] or [[row["max_logit"]]], row["max_logit"]
            largest = max(head for layer in logits for head in layer)
            logits = [[most if head == largest else head for head in layer] for layer in logits]
            entropy = None
            if row["entropy"] is not None:
                lowest = row["entropy_lowest"]
                entropy = [[lowest, 2 * row["entropy"] - lowest]]
            yield {"kind": "attention", "step": step, "max_logits": logits, "entropy": entropy}
        if row["updates"] is not None or row["clipped"] is not None:
            keys = ("clipped", "bounded", "relative_change")
            mean = {"parameter": "mean", "smallest_ratio": math.nan, "largest_ratio": math.nan}
            parts = row["updates"] or [mean | {key: row[key] for key in keys}]
            named = {part["parameter"]: {k: v for k, v in part.items() if k != "parameter"} for part in parts}
            yield {"kind": "update", "step": step, "parameters": named}
        if row["validation_loss"] is not None:
            loss = row["validation_loss"]
            yield {"kind": "validation", "step": step, "tokens": row["tokens"], "loss": loss}
        yield from (event for event in events if event["what"] not in ("started", "resumed"))


def _names(archive: Path) -> list[str]:
    return [head.name for head in _load(archive)[0]] if archive.is_file() else []


def _load(path: Path) -> tuple[list[Any], dict[str, list[dict[str, Any]]]]:
    status = path.stat()
    return _cached(path.absolute(), (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=8)
def _cached(path: Path, _: tuple[int, int]) -> tuple[list[Any], dict[str, list[dict[str, Any]]]]:
    from merit_lab.runs import archive  # polars is not needed to train

    heads, steps = archive.read(path)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in steps.iter_rows(named=True):
        rows.setdefault(row["run"], []).append(row)
    return heads, rows
