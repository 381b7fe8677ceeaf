"""What measurements at a checkpoint share: their options, their files, and the frame of their commands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from merit_lab.command_line import rules
from merit_lab.folders import check_writable
from merit_lab.progress import WorkProgress
from merit_lab.runs import Measurements
from merit_lab.train.signals import Interrupted, StopRequest, listening
from merit_lab.train.snapshot import Snapshot

_Arguments = TypeVar("_Arguments")


@dataclass(frozen=True, kw_only=True)
class AtCheckpoint:
    """The options of all of them."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    checkpoint: int | None = None
    """Step of the checkpoint. None: the newest."""

    def snapshot(self) -> Snapshot:
        """Find the checkpoint."""
        return Snapshot.find(self.run, self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class OnData(AtCheckpoint):
    """The options of those that need the run's data."""

    data: Path | None = None
    """The folder of the run's data, if it has moved."""


class StoppableProgress(WorkProgress):
    """Progress of work that ends when a unit of it is done after a signal."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self._stop = stop

    def advance(self, num: float = 1) -> None:
        """Count some units as done. Raise Interrupted after a signal."""
        super().advance(num)
        if self._stop.signum:
            raise self._stop.interrupted("; finished parts are kept")


class Part(NamedTuple):
    """A part to measure: the settings it follows from, what returns its result, and how much work it is."""

    settings: Mapping[str, Any]
    measure: Callable[[StoppableProgress], Mapping[str, Any]]
    total: int | None = None


class Measured(NamedTuple):
    """The results of all parts, measured now or earlier, and the file they are in."""

    path: Path
    snapshot: Snapshot
    results: dict[str, dict[str, Any]]


def measure_missing(
    kind: str, snapshot: Snapshot, parts: Mapping[str, Part], environment: Mapping[str, Any], unit: str
) -> Measured:
    """Measure the parts that are not known with the same settings; each is written when it is done.

    Raises ``Interrupted`` after a signal; a second call continues with the missing parts.

    Args:
        kind: the folder of the results in the run directory.
        snapshot: the checkpoint.
        parts: by name, in their order.
        environment: of this process.
        unit: of the work, for its progress.
    """
    written = Measurements(snapshot.run.folder / kind / f"{snapshot.path.name}.json")
    missing = [name for name, part in parts.items() if written.find(name, part.settings) is None]
    if missing:
        check_writable(written.path.parent)
    with listening() as stop:
        progress = StoppableProgress(stop)
        for name in missing:
            began = time.monotonic()
            with progress.piece(name, parts[name].total, unit):
                result = parts[name].measure(progress)
            seconds = round(time.monotonic() - began, 3)
            written.put(name, parts[name].settings, result, seconds=seconds, environment=environment)
            progress.say(f"{name}: measured in {seconds:.1f} s")
    return Measured(written.path, snapshot, {name: written.parts[name]["result"] for name in parts})


def run_command(
    name: str, kind: type[_Arguments], act: Callable[[_Arguments], None], argv: Sequence[str]
) -> int:
    """Parse a command's options, act on them, and return its exit status: 128 + n after signal n."""
    try:
        act(tyro.cli(kind, args=list(argv), prog=f"merit {name}", registry=rules()))
    except Interrupted as interrupted:
        print(f"merit {name}: {interrupted}. The same command continues.", file=sys.stderr)
        return 128 + interrupted.signum
    # Errors of arithmetic are those of runs that diverged; RuntimeError: ARPACK's, or the run is in use.
    except (OSError, ValueError, ArithmeticError, RuntimeError, ModuleNotFoundError) as error:
        print(f"merit {name}: {error}", file=sys.stderr)
        return 1
    return 0
