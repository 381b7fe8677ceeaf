"""The run directory: what was asked for, where it ran, what was measured, and the checkpoints.

    config.json         what was asked for
    environment.json    versions, device, data, command line
    metrics.jsonl       what was measured; see metrics.py
    checkpoints/        step-00000100/ and so on; see train/checkpoint.py
    tensorboard/        the same numbers for TensorBoard
    lock                who works on it; see lock.py

Evaluation and report read these files and nothing else, so they can be made again anywhere. Of runs that are
kept the first three are in one file; see archive.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from merit_lab.record import durable
from merit_lab.record.find import kept_path
from merit_lab.record.json_types import fits
from merit_lab.record.lock import is_locked
from merit_lab.record.metrics import read_metrics

FORMAT = 1
"""Version of the run directory; grows when a reader of the old one would misread the new one."""

Status = Literal["finished", "diverged", "abandoned", "interrupted", "running", "unfinished"]

_ENDS: tuple[Status, ...] = ("finished", "diverged", "abandoned", "interrupted")
_BEGINS = ("started", "resumed")


@dataclass(frozen=True)
class Run:
    """A run directory, or what was kept of one. ``create`` makes one, ``open`` reads one."""

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
        """Read the run in a folder, or the one that is kept in its place."""
        folder = Path(folder)
        if not _is_there(folder):
            if kept := kept_path(folder):
                from merit_lab.record.archive import read_head  # pyarrow is not needed to train

                return cls(kept, *read_head(kept.parent, kept.name))
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
        environment = _load(folder / "environment.json")
        for part in ("versions", "device", "data"):
            if not fits(environment.get(part, {}), dict[str, Any]):
                raise ValueError(
                    f"{folder / 'environment.json'} has {environment[part]!r} as {part}; it must be an "
                    "object. Put back the file that the run wrote."
                )
        return cls(folder, config, environment)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def metrics_path(self) -> Path:
        """The file of measurements."""
        return self.folder / "metrics.jsonl"

    @property
    def data_fingerprint(self) -> str:
        """The fingerprint of the data that the run began with."""
        try:
            return str(self.environment["data"]["fingerprint"])
        except KeyError:
            raise ValueError(
                f"{self.folder / 'environment.json'} does not say which data the run began with; put "
                "back the file that the run wrote"
            ) from None

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        if self.is_kept:
            raise ValueError(
                f"{self.folder.parent} has what {self.name} recorded and no checkpoints; give its run "
                "directory, or train it again"
            )
        return self.folder / "checkpoints"

    @property
    def is_kept(self) -> bool:
        """Whether it is read from a file of `merit keep`, and not from its directory."""
        return self.folder.parent.is_file()

    def lines(self) -> Iterator[dict[str, Any]]:
        """All measurements, in the order they were made."""
        if not self.is_kept:
            return read_metrics(self.metrics_path)
        from merit_lab.record.archive import read_lines

        return read_lines(self.folder.parent, self.name)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """All measurements of a kind, in the order they were made."""
        return [line for line in self.lines() if line["kind"] == kind]

    @property
    def outcome(self) -> Status | None:
        """How the run ended when a process last worked on it; None if it has not, or died without a word."""
        return outcome_of(self.metrics("event"))

    @property
    def status(self) -> Status:
        """How far the run is: "unfinished" is one whose process died without a word."""
        return "running" if is_locked(self.folder) else self.outcome or "unfinished"


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder, or kept in its place.

    One that was killed while it was made is none yet.
    """
    return _is_there(folder) or kept_path(folder) is not None


def refuse_run(folder: Path) -> None:
    """Raise where a folder holds a run, or one is kept in its place."""
    if _is_there(folder):
        raise FileExistsError(
            f"{folder} holds a run already. Go on with it (merit train --resume {folder}), or choose another "
            "folder with --out."
        )
    if kept := kept_path(folder):
        raise FileExistsError(
            f"{kept.parent} keeps a run {kept.name} already. Choose another folder with --out."
        )


def outcome_of(events: Sequence[dict[str, Any]]) -> Status | None:
    """How a run with these events ended; None where it has begun and not ended, or not begun."""
    turns = [event["what"] for event in events if event["what"] in (*_BEGINS, *_ENDS)]
    return cast(Status, turns[-1]) if turns and turns[-1] in _ENDS else None


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").exists()


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
