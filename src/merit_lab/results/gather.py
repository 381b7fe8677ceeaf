"""Find runs in folders and read their settings and measurements."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from merit_lab.results.curves import (
    CurveReader,
    Curves,
    Point,
    Rows,
    ThinnedCurves,
    finite,
    last_validation_loss,
    read_curves,
)
from merit_lab.runs import (
    Run,
    Status,
    folders_left_out,
    has_all_steps,
    is_locked,
    nested_run_folders,
    outcome_of,
)
from merit_lab.runs.settings import flatten

# Display names of optimizers, in display order. Others follow, under their class names.
DISPLAY_NAMES = {
    "adamw": "AdamW",
    "lamb": "LAMB",
    "maxlamb": "MaxLAMB",
    "merit": "MERIT",
    "lion": "Lion",
    "sophiag": "SophiaG",
    "soap": "SOAP",
    "soap-merit": "SOAPMERIT",
    "orscale": "OrScale",
    "muon": "Muon",
    "normuon": "NorMuon",
    "muon-merit": "MuonMERIT",
}

_FEW_ROWS = 3  # one before training, one with the tokens of a step, and the last


def short_name(optimizer: str) -> str:
    """An optimizer's name; for MODULE:CLASS, the class."""
    return optimizer.rpartition(":")[2]


def display_name(optimizer: str) -> str:
    """An optimizer's display name."""
    return DISPLAY_NAMES.get(optimizer, short_name(optimizer))


def display_names(optimizers: Iterable[str]) -> dict[str, str]:
    """Display names of several optimizers; MODULE:CLASS if the class alone is ambiguous."""
    short = {optimizer: display_name(optimizer) for optimizer in optimizers}
    taken = Counter(short.values())
    return {
        optimizer: DISPLAY_NAMES.get(optimizer, optimizer) if taken[name] > 1 else name
        for optimizer, name in short.items()
    }


@dataclass(frozen=True)
class MeasuredRun:
    """A run and its measurements at the moment it was read; its files are read once.

    ``thinned`` are its curves if it was skimmed; otherwise they follow from ``rows``. ``evaluations`` are the
    results of the last checkpoint that was evaluated; only skimming reads them.
    """

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    status: Status
    rows: Rows
    thinned: ThinnedCurves | None = None
    evaluations: tuple[Any, ...] = ()

    @classmethod
    def read(cls, run: Run) -> MeasuredRun:
        """Read a run's measurements, sorted by kind."""
        # The lock first: a run that ends while it is read may lack lines, but then it counts as running.
        locked = is_locked(run.folder)
        rows: Rows = {}
        for row in run.lines():
            rows.setdefault(row["kind"], []).append(row)
        return cls(run.name, run.config, run.environment, _status(run, rows, locked), rows)

    @classmethod
    def skim(cls, run: Run) -> MeasuredRun:
        """Read a run of any length: thinned curves, all events, a few of the other lines, and evaluations.

        ``rows`` has the first two lines of each kind and the last one.
        """
        locked = is_locked(run.folder)
        rows: Rows = {}
        reader = CurveReader()
        for row in run.lines():
            reader.add(row)
            kept = rows.setdefault(row["kind"], [])
            if row["kind"] == "event" or len(kept) < _FEW_ROWS:
                kept.append(row)
            else:
                kept[-1] = row
        status, curves = _status(run, rows, locked), reader.curves()
        return cls(run.name, run.config, run.environment, status, rows, curves)

    @cached_property
    def curves(self) -> Curves:
        """The measured curves by name; see curves.py."""
        return read_curves(self.rows) if self.thinned is None else self.thinned.curves

    def points(self, curve: str) -> list[Point]:
        """The finite points of a curve; empty if it was not measured."""
        return finite(self.curves.get(curve, []))

    @cached_property
    def settings(self) -> dict[str, object]:
        """The configuration by dotted path, with the data's fingerprint in place of their folder."""
        return flatten({**self.config, "data": self.fingerprint})

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of its data; None if it was not recorded."""
        value = self.environment.get("data", {}).get("fingerprint")
        return None if value is None else str(value)

    @property
    def bits_per_byte(self) -> float | None:
        """The factor from nats per token to bits per byte of text; None if it was not recorded."""
        bytes_per_token = self.environment.get("data", {}).get("bytes_per_token")
        is_number = isinstance(bytes_per_token, int | float) and bytes_per_token > 0
        return 1 / (math.log(2) * bytes_per_token) if is_number else None

    @property
    def seed(self) -> int:
        """The seed; 0 if the configuration has none."""
        value = self.config.get("seed", 0)
        return value if isinstance(value, int) else 0

    @property
    def extent(self) -> tuple[int, int]:
        """Its last step, and the number of points of all curves."""
        steps = [row["step"] for rows in self.rows.values() for row in rows]
        return max(steps, default=0), sum(map(len, self.curves.values()))


def find_runs(paths: Iterable[Path]) -> list[MeasuredRun]:
    """Read the runs at ``paths``, each a run directory, a folder of runs, or a file of kept runs."""
    return [replace(MeasuredRun.skim(run), name=name) for name, run in open_runs(paths).items()]


def open_runs(paths: Iterable[Path]) -> dict[str, Run]:
    """Open the same runs, by unique names."""
    return {name: Run.open(folder) for folder, name in _names(find_folders(paths)).items()}


def find_folders(paths: Iterable[Path]) -> list[Path]:
    """The paths of the runs at ``paths``, each once. A folder without runs stands for those below it."""
    folders: dict[Path, None] = {}  # in order
    for path in paths:
        runs = nested_run_folders(path)
        if not runs and not path.exists():
            raise ValueError(
                f"{path}: no such folder; give run directories, folders of runs, or files of kept runs"
            )
        if not runs:
            raise ValueError(
                f"{path} holds no run; a run is a folder with a config.json, as written by `merit train`, or "
                "part of a runs.parquet, as written by `merit keep`"
            )
        folders.update(dict.fromkeys(folder.resolve() for folder in runs))
    if not folders:
        raise ValueError("no runs given; give run directories, or folders of runs")
    return list(folders)


def say_what_is_left_out(command: str, paths: Iterable[Path]) -> None:
    """Print a line for each folder that stands for its own runs and not for those in the folders below it."""
    for path in paths:
        if folders := folders_left_out(path):
            print(
                f"{command}: {path} stands for the runs in it; those in {folders[0]}"
                f"{' and other folders' if len(folders) > 1 else ''} are left out, unless they are named too",
                file=sys.stderr,
            )


def _names(folders: Iterable[Path]) -> dict[Path, str]:
    """Each folder's name, with as many parent folders as make it unique."""
    names = {folder: folder.name for folder in folders}
    for depth in itertools.count(2):
        taken = Counter(names.values())
        alike = [folder for folder, name in names.items() if taken[name] > 1]
        if not alike:
            break
        names |= {folder: "/".join(folder.parts[-depth:]) for folder in alike}
    return names


def _status(run: Run, rows: Rows, locked: bool) -> Status:
    status: Status = "running" if locked else outcome_of(rows.get("event", [])) or "unfinished"
    if status == "unfinished" and has_all_steps(run.config, rows.get("validation", [])):
        status = "finished"  # killed while it saved its last weights; all measurements are there
    loss = last_validation_loss(rows)
    if status == "finished" and loss is not None and not math.isfinite(loss):
        return "diverged"  # training checks the loss before a step, so not after the last one
    return status
