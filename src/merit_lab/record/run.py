"""The run directory: what was asked for, where it ran, what was measured, and the checkpoints.

    config.json         what was asked for
    environment.json    versions, device, data, command line
    metrics.jsonl       what was measured; see metrics.py
    checkpoints/        step-00000100/ and so on; see train/checkpoint.py
    tensorboard/        the same numbers for TensorBoard
    lock                who works on it; see lock.py

Evaluation and report read these files and nothing else, so they can be made again anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from merit_lab.record import durable
from merit_lab.record.lock import is_locked
from merit_lab.record.metrics import read_metrics

FORMAT = 1
"""Version of the run directory; grows when a reader of the old one would misread the new one."""

Status = Literal["finished", "diverged", "interrupted", "running", "unfinished"]

_ENDS: tuple[Status, ...] = ("finished", "diverged", "interrupted")
_BEGINS = ("started", "resumed")


@dataclass(frozen=True)
class Run:
    """A run directory. ``create`` makes one, ``open`` reads one."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def create(cls, folder: Path | str, config: dict[str, Any], environment: dict[str, Any]) -> Self:
        """Begin a run in a folder that holds none yet."""
        folder = Path(folder)
        refuse_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / "environment.json", _json(environment))
        # Last, for it is what makes a folder a run.
        durable.write(folder / "config.json", _json({"format": FORMAT, **config}))
        return cls(folder, config, environment)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the run in a folder."""
        folder = Path(folder)
        if not holds_run(folder):
            raise FileNotFoundError(
                f"{folder} holds no run: there is no config.json. A run directory is what --out of "
                "`merit train` named."
            )
        config = _load(folder / "config.json")
        if (version := config.pop("format", None)) != FORMAT:
            raise ValueError(
                f"{folder / 'config.json'} has format {version!r}; this version of merit-optim reads format "
                f"{FORMAT}. Use the version that wrote it (environment.json names it), or start a new run."
            )
        return cls(folder, config, _load(folder / "environment.json"))

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def metrics_path(self) -> Path:
        """The file of measurements."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.folder / "checkpoints"

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """All measurements of a kind, in the order they were made."""
        return [line for line in read_metrics(self.metrics_path) if line["kind"] == kind]

    @property
    def outcome(self) -> Status | None:
        """How the run ended when a process last worked on it; None if it has not, or died without a word."""
        return outcome_of(self.metrics("event"))

    @property
    def status(self) -> Status:
        """How far the run is: "unfinished" is one whose process died without a word."""
        return "running" if is_locked(self.folder) else self.outcome or "unfinished"


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder. One that was killed while it was made is none yet."""
    return (folder / "config.json").exists()


def refuse_run(folder: Path) -> None:
    """Raise where a folder holds a run."""
    if holds_run(folder):
        raise FileExistsError(f"{folder} holds a run already. Resume it, or choose another folder.")


def outcome_of(events: Sequence[dict[str, Any]]) -> Status | None:
    """How a run with these events ended; None where it has begun and not ended, or not begun."""
    turns = [event["what"] for event in events if event["what"] in (*_BEGINS, *_ENDS)]
    return cast(Status, turns[-1]) if turns and turns[-1] in _ENDS else None


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing; the run directory is not whole. Put the file back, or start a new run."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); put back the file that the run wrote") from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{path} holds a {type(value).__name__}, not a JSON object; put back the file that the run wrote"
        )
    return value
