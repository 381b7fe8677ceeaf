"""How far the runs of trials are, read from their directories."""

from __future__ import annotations

import json
from pathlib import Path

from merit_lab.runs import OVER, Run, holds_run, is_locked
from merit_lab.study.trial import Trial

_BLOCK = 1 << 14  # bytes of the end of a metrics file that are read first
_DONE: set[Path] = set()


def is_done(folder: Path) -> bool:
    """Whether a run has finished, diverged or been abandoned. Runs that are done are not read again."""
    folder = folder.resolve()  # the cache must not depend on the current folder
    if not holds_run(folder):
        return False
    if folder not in _DONE and not is_locked(folder) and Run.open(folder).outcome in OVER:
        _DONE.add(folder)
    return folder in _DONE


def last_step(run: Trial) -> tuple[int, float | None]:
    """Steps done and the last training loss of a run; 0 and None before its first training line.

    This is called every second, so the file is read from its end, only as far back as necessary.
    """
    path = run.folder / "metrics.jsonl"
    end = path.stat().st_size if path.exists() else 0
    begin, size = end, _BLOCK
    while begin > 0:
        begin, size = max(0, end - size), 4 * size
        for line in reversed(_whole_lines(path, begin, end)):
            row = json.loads(line)
            if row["kind"] == "train":
                return row["step"], float(row["loss"])  # may be the string "nan"
    return 0, None


def _whole_lines(path: Path, begin: int, end: int) -> list[bytes]:
    """The complete lines between two positions of a file."""
    with path.open("rb") as file:
        file.seek(begin)
        *lines, _ = file.read(end - begin).split(b"\n")
    return lines[1:] if begin > 0 else lines
