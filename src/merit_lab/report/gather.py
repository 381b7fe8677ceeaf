"""Runs from folders: their settings, and what they had measured when they were read."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from merit_lab.record import Run, Status, is_locked, outcome_of, run_folders
from merit_lab.report.curves import (
    CurveReader,
    Curves,
    Rows,
    ThinnedCurves,
    last_validation_loss,
    read_curves,
)

# How optimizers are written, in the order in which they are shown. Others follow under their own names.
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

_FEW_ROWS = 3  # one before training, one that tells the tokens of a step, and the last


def short_name(optimizer: str) -> str:
    """An optimizer's name; of one named as MODULE:CLASS, the class."""
    return optimizer.rpartition(":")[2]


def display_name(optimizer: str) -> str:
    """How an optimizer is written."""
    return DISPLAY_NAMES.get(optimizer, short_name(optimizer))


def display_names(optimizers: Iterable[str]) -> dict[str, str]:
    """How each of several optimizers is written: by MODULE:CLASS where its class alone is not enough."""
    short = {optimizer: display_name(optimizer) for optimizer in optimizers}
    taken = Counter(short.values())
    return {
        optimizer: DISPLAY_NAMES.get(optimizer, optimizer) if taken[name] > 1 else name
        for optimizer, name in short.items()
    }


@dataclass(frozen=True)
class MeasuredRun:
    """A run and what it had measured at the moment it was read; its files are read once.

    ``thinned`` are its curves where it was skimmed; else they follow from ``rows``.
    """

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    status: Status
    rows: Rows
    thinned: ThinnedCurves | None = None

    @classmethod
    def read(cls, run: Run) -> MeasuredRun:
        """Read a run's measurements, sorted by kind."""
        # In this order: of a run that ends meanwhile, lines are missing only if it counts as running.
        locked = is_locked(run.folder)
        rows: Rows = {}
        for row in run.lines():
            rows.setdefault(row["kind"], []).append(row)
        return cls(run.name, run.config, run.environment, _status(rows, locked), rows)

    @classmethod
    def skim(cls, run: Run) -> MeasuredRun:
        """Read a run of any length: its curves thinned, all events, and of other lines few.

        ``rows`` has the first two lines of a kind and the last one.
        """
        locked = is_locked(run.folder)
        rows: Rows = {}
        reader = CurveReader()
        for row in run.lines():
            reader.add(row)
            own = rows.setdefault(row["kind"], [])
            if row["kind"] == "event" or len(own) < _FEW_ROWS:
                own.append(row)
            else:
                own[-1] = row
        return cls(run.name, run.config, run.environment, _status(rows, locked), rows, reader.curves())

    @cached_property
    def curves(self) -> Curves:
        """What was measured, by name; see curves.py."""
        return read_curves(self.rows) if self.thinned is None else self.thinned.curves

    @cached_property
    def settings(self) -> dict[str, object]:
        """The configuration by dotted path; for the data what they are and not where they lie."""
        return flatten({**self.config, "data": self.fingerprint})

    @property
    def fingerprint(self) -> str | None:
        """What identifies its data; None where that was not recorded."""
        value = self.environment.get("data", {}).get("fingerprint")
        return None if value is None else str(value)

    @property
    def bits_per_byte(self) -> float | None:
        """What a nat for each token is in bits for each byte of text; None where that was not recorded."""
        bytes_per_token = self.environment.get("data", {}).get("bytes_per_token")
        return 1 / (math.log(2) * bytes_per_token) if bytes_per_token else None

    @property
    def seed(self) -> int:
        """The seed; 0 where the configuration has none."""
        value = self.config.get("seed", 0)
        return value if isinstance(value, int) else 0

    @property
    def extent(self) -> tuple[int, int]:
        """How far it came, and how many points its curves have."""
        steps = [row["step"] for rows in self.rows.values() for row in rows]
        return max(steps, default=0), sum(map(len, self.curves.values()))


def find_runs(paths: Iterable[Path]) -> list[MeasuredRun]:
    """The runs at ``paths``, each a run directory, a folder that holds runs, or a file of kept ones."""
    return [replace(MeasuredRun.skim(run), name=name) for name, run in open_runs(paths).items()]


def open_runs(paths: Iterable[Path]) -> dict[str, Run]:
    """The same runs, by names that tell them apart."""
    return {name: Run.open(folder) for folder, name in _names(find_folders(paths)).items()}


def find_folders(paths: Iterable[Path]) -> list[Path]:
    """The paths of the runs at ``paths``, each once."""
    folders: dict[Path, None] = {}  # in order
    for path in paths:
        found = run_folders(path)
        if not found and not path.exists():
            raise ValueError(
                f"{path}: no such folder; give run directories, folders that hold some, or files of kept runs"
            )
        if not found:
            raise ValueError(
                f"{path} holds no run; a run is a folder with a config.json, as `merit train` writes it, or "
                "in a runs.parquet, as `merit keep` writes it"
            )
        folders.update(dict.fromkeys(folder.resolve() for folder in found))
    if not folders:
        raise ValueError("no run is given; give run directories, or folders that hold some")
    return list(folders)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested settings as one table from dotted path to value."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value != []:  # nothing was given, as in records from before there was such a setting
            flat[f"{prefix}{key}"] = tuple(value) if isinstance(value, list) else value
    return flat


def differing(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """The paths whose values are not the same in all of ``settings``."""
    paths = dict.fromkeys(path for own in settings for path in own)
    missing = object()
    return [path for path in paths if len({repr(own.get(path, missing)) for own in settings}) > 1]


def show(value: object) -> str:
    """A setting's value as it is written for readers."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ", ".join(show(item) for item in value)
    return str(value)


def _names(folders: Iterable[Path]) -> dict[Path, str]:
    """Each folder's name, with as many of the folders above it as tell it from the others."""
    names = {folder: folder.name for folder in folders}
    for depth in itertools.count(2):
        taken = Counter(names.values())
        alike = [folder for folder, name in names.items() if taken[name] > 1]
        if not alike:
            break
        names |= {folder: "/".join(folder.parts[-depth:]) for folder in alike}
    return names


def _status(rows: Rows, locked: bool) -> Status:
    status: Status = "running" if locked else outcome_of(rows.get("event", [])) or "unfinished"
    loss = last_validation_loss(rows)
    if status == "finished" and loss is not None and not math.isfinite(loss):
        return "diverged"  # in its last steps: training looks at the loss before a step, not after
    return status
