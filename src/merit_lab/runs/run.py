"""The run directory: configuration, environment, measurements and checkpoints.

    config.json         the configuration
    environment.json    versions, device, data, command line
    metrics.jsonl       the measurements; see metrics.py
    checkpoints/        step-00000100/ and so on; see train/checkpoint.py
    evaluate/           step-00000100.json and so on; see measurements.py
    tensorboard/        the same numbers for TensorBoard
    lock                the process that uses it; see lock.py

Evaluation and report read only these files, so they can be repeated anywhere. For kept runs the first three
are in one file; see archive.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from merit_lab import durable
from merit_lab.json_values import convert, encode, read_object
from merit_lab.runs.find import archive_of
from merit_lab.runs.lock import is_locked
from merit_lab.runs.metrics import read_metrics

if TYPE_CHECKING:
    from merit_lab.runs.archive import Head

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
    kept: Head | None = None
    """What is kept of it, if it is read from a file of `merit keep` instead of its directory."""

    @classmethod
    def create(cls, folder: Path | str, config: dict[str, Any], environment: dict[str, Any]) -> Self:
        """Create a run in a folder without one."""
        folder = Path(folder)
        refuse_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        durable.write(folder / "environment.json", encode(environment, indent=2) + "\n")
        # Last, because this file makes a folder a run.
        durable.write(folder / "config.json", encode({"format": FORMAT, **config}, indent=2) + "\n")
        return cls(folder, config, environment)

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Read the run in a folder, or the kept run with its path."""
        folder = Path(folder)
        if not _is_there(folder):
            if kept := _kept(folder):
                return cls(Path(kept.folder), kept.config, kept.environment, kept)
            raise FileNotFoundError(
                f"{folder} holds no run: there is no config.json. Give a run directory, the --out of "
                "`merit train`."
            )
        config = read_object(folder / "config.json")
        if (version := config.pop("format", None)) != FORMAT:
            raise ValueError(
                f"{folder / 'config.json'} has format {version!r}; this version of merit-optim reads format "
                f"{FORMAT}. Use the version that wrote it (environment.json names it), or start a new run."
            )
        environment = read_object(folder / "environment.json")
        try:
            for part in ("versions", "device", "data"):
                convert(environment.get(part, {}), dict[str, Any], part)
        except ValueError as error:
            raise ValueError(
                f"{folder / 'environment.json'}: {error}. Restore the file that the run wrote."
            ) from None
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
        if self.kept is not None:
            raise ValueError(
                f"{self.folder.parent} has only the record of {self.name} and no checkpoints; give its run "
                "directory, or train it again"
            )
        return self.folder / "checkpoints"

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return all measurements of a kind, in order. Those of a kept run are in its table alone."""
        assert self.kept is None
        return [line for line in read_metrics(self.metrics_path) if line["kind"] == kind]

    @property
    def last_loss(self) -> float | None:
        """The last validation loss."""
        if self.kept is not None:
            return self.kept.last_loss
        losses = [line["loss"] for line in self.metrics("validation")]
        return losses[-1] if losses else None

    @property
    def outcome(self) -> Status | None:
        """How the last process of the run ended; None if it has not ended, or was killed."""
        return outcome_of(self.metrics("event")) if self.kept is None else cast(Status, self.kept.status)

    @property
    def status(self) -> Status:
        """The state of the run; "unfinished" if its process was killed."""
        return "running" if is_locked(self.folder) else self.outcome or "unfinished"


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder, or a kept run with its path.

    A run that was killed while it was created does not count.
    """
    return _is_there(folder) or _kept(folder) is not None


def refuse_run(folder: Path) -> None:
    """Raise FileExistsError if a folder holds a run, or there is a kept run with its path."""
    if _is_there(folder):
        raise FileExistsError(
            f"{folder} holds a run already. Resume it (merit train --resume {folder}), or choose another "
            "folder with --out."
        )
    if kept := _kept(folder):
        raise FileExistsError(f"{kept.folder} is a kept run already. Choose another folder with --out.")


def step_path(folder: Path, step: int) -> Path:
    """The path of what a folder has of one step."""
    return folder / f"step-{step:08d}"


def outcome_of(events: Sequence[dict[str, Any]]) -> Status | None:
    """Return how a run with these events ended; None if it has not started or not ended."""
    turns = [event["what"] for event in events if event["what"] in (*_BEGINS, *_ENDS)]
    return cast(Status, turns[-1]) if turns and turns[-1] in _ENDS else None


def _is_there(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _kept(folder: Path) -> Head | None:
    """What is kept of a run, given its path in its file or that of its directory; None if it is not kept."""
    if not (file := archive_of(folder.parent)).is_file():
        return None
    from merit_lab.runs import archive  # which imports polars: training does not need it

    return archive.kept(file).get(folder.name)
