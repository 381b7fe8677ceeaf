"""The run directory: configuration, environment, measurements and checkpoints.

    config.json         the configuration
    environment.json    versions, device, data, command line
    metrics.jsonl       the measurements; see metrics.py
    checkpoints/        step-00000100/ and so on; see train/checkpoint_files.py
    evaluate/           step-00000100.json and so on; see measurements.py
    tensorboard/        the same numbers for TensorBoard
    lock                the process that uses it; see lock.py

Evaluation and report read only these files, so they can be repeated anywhere. For kept runs the first three
are in one file; see archive.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from merit_lab.runs import durable, strict_json
from merit_lab.runs.json_types import fits
from merit_lab.runs.kept import head_of, kept_path, lines_of
from merit_lab.runs.lock import is_locked
from merit_lab.runs.metrics import read_metrics

FORMAT = 1
"""Version of the run directory; increased when older readers would misread it."""

Status = Literal["finished", "diverged", "abandoned", "interrupted", "running", "unfinished"]

OVER: tuple[Status, ...] = ("finished", "diverged", "abandoned")
"""How runs end that are not continued."""
_ENDS: tuple[Status, ...] = (*OVER, "interrupted")
_BEGINS = ("started", "resumed")


@dataclass(frozen=True)
class Run:
    """A run directory, or a kept run. ``create`` makes one, ``open`` reads one."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def create(cls, folder: Path | str, config: dict[str, Any], environment: dict[str, Any]) -> Self:
        """Create a run in a folder without one."""
        folder = Path(folder)
        refuse_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / "environment.json", _json(environment))
        # Last, because this file makes a folder a run.
        durable.write(folder / "config.json", _json({"format": FORMAT, **config}))
        return cls(folder, config, environment)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the run in a folder, or the kept run with its path."""
        folder = Path(folder)
        if not _is_there(folder):
            if kept := kept_path(folder):
                head = head_of(kept)
                return cls(kept, head.config, head.environment)
            raise FileNotFoundError(
                f"{folder} holds no run: there is no config.json. Give a run directory, the --out of "
                "`merit train`."
            )
        config = strict_json.read_object(folder / "config.json")
        if (version := config.pop("format", None)) != FORMAT:
            raise ValueError(
                f"{folder / 'config.json'} has format {version!r}; this version of merit-optim reads format "
                f"{FORMAT}. Use the version that wrote it (environment.json names it), or start a new run."
            )
        environment = strict_json.read_object(folder / "environment.json")
        for part in ("versions", "device", "data"):
            if not fits(environment.get(part, {}), dict[str, Any]):
                raise ValueError(
                    f"{folder / 'environment.json'} has {environment[part]!r} as {part}; it must be an "
                    "object. Restore the file that the run wrote."
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
        """The fingerprint of the data that the run started with."""
        try:
            return str(self.environment["data"]["fingerprint"])
        except KeyError:
            raise ValueError(
                f"{self.folder / 'environment.json'} does not say which data the run started with; restore "
                "the file that the run wrote"
            ) from None

    def check_data(self, folder: Path, fingerprint: str) -> None:
        """Raise ValueError if a folder of data, with this fingerprint, is not what the run started with."""
        if fingerprint != self.data_fingerprint:
            raise ValueError(
                f"{folder} does not hold the data that the run was trained on: its fingerprint is "
                f"{fingerprint}, not {self.data_fingerprint}; restore them, or give their folder with --data"
            )

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        if self.is_kept:
            raise ValueError(
                f"{self.folder.parent} has only the record of {self.name} and no checkpoints; give its run "
                "directory, or train it again"
            )
        return self.folder / "checkpoints"

    @property
    def is_kept(self) -> bool:
        """Whether it is read from a file of `merit keep` instead of its directory."""
        return self.folder.parent.is_file()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Return all measurements, in order."""
        return lines_of(self.folder) if self.is_kept else read_metrics(self.metrics_path)

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return all measurements of a kind, in order."""
        return [line for line in self.lines() if line["kind"] == kind]

    @property
    def outcome(self) -> Status | None:
        """How the last process of the run ended; None if it has not ended, or was killed.

        A kept run that was killed after its last measurement has finished: there is nothing to resume.
        """
        ended = outcome_of(self.metrics("event"))
        if ended is None and self.is_kept:
            return "finished" if has_all_steps(self.config, self.metrics("validation")) else None
        return ended

    @property
    def is_running(self) -> bool:
        """Whether a process works on the run now."""
        return is_locked(self.folder)

    @property
    def status(self) -> Status:
        """The state of the run; "unfinished" if its process was killed."""
        return "running" if self.is_running else self.outcome or "unfinished"


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder, or a kept run with its path.

    A run that was killed while it was created does not count.
    """
    return _is_there(folder) or kept_path(folder) is not None


def refuse_run(folder: Path) -> None:
    """Raise FileExistsError if a folder holds a run, or there is a kept run with its path."""
    if _is_there(folder):
        raise FileExistsError(
            f"{folder} holds a run already. Resume it (merit train --resume {folder}), or choose another "
            "folder with --out."
        )
    if kept := kept_path(folder):
        raise FileExistsError(
            f"{kept.parent} keeps a run {kept.name} already. Choose another folder with --out."
        )


def step_path(folder: Path, step: int) -> Path:
    """The path of what a folder has of one step."""
    return folder / f"step-{step:08d}"


def outcome_of(events: Sequence[dict[str, Any]]) -> Status | None:
    """Return how a run with these events ended; None if it has not started or not ended."""
    turns = [event["what"] for event in events if event["what"] in (*_BEGINS, *_ENDS)]
    return cast(Status, turns[-1]) if turns and turns[-1] in _ENDS else None


def has_all_steps(config: Mapping[str, Any], validations: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the loss was measured after the last step."""
    return config.get("steps") in {line["step"] for line in validations}


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
