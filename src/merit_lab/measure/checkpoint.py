"""What measurements at a checkpoint share: their options, their files, and the frame of their commands."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tyro

from merit_lab.command_line import rules
from merit_lab.folders import check_writable
from merit_lab.progress import WorkProgress
from merit_lab.runs import Measurements
from merit_lab.train.signals import Interrupted, listening
from merit_lab.train.snapshot import Snapshot

_Arguments = TypeVar("_Arguments")


@dataclass(frozen=True, kw_only=True)
class AtCheckpoint:
    """The options of all of them."""

    run: tyro.conf.Positional[Path]
    """The run directory."""
    checkpoint: int | None = None
    """Step of the checkpoint. None: the newest."""


class Part(NamedTuple):
    """A part to measure: the settings it follows from, and what measures its ``result`` (and more)."""

    settings: Mapping[str, Any]
    measure: Callable[[], Mapping[str, Any]]


def measure_missing(
    kind: str,
    snapshot: Snapshot,
    parts: Mapping[str, Part],
    environment: Callable[[], dict[str, Any]],
    progress: WorkProgress,
) -> Measurements:
    """Measure the parts that are not known with the same settings; each is written when it is done."""
    written = Measurements(snapshot.run.folder / kind / f"{snapshot.path.name}.json")
    missing = [name for name, part in parts.items() if written.find(name, part.settings) is None]
    if missing:
        check_writable(written.path.parent)
        about = environment()
    for name in missing:
        began = time.monotonic()
        found = parts[name].measure()
        seconds = round(time.monotonic() - began, 3)
        written.put(name, parts[name].settings, **found, seconds=seconds, environment=about)
        progress.say(f"{name}: measured in {seconds:.1f} s")
    return written


@contextlib.contextmanager
def stoppable(progress: WorkProgress) -> Iterator[Callable[[], None]]:
    """Yield a function that counts a unit of work as done, and raises Interrupted after a signal."""
    with listening() as stop:

        def advance() -> None:
            progress.advance()
            if stop.signum:
                raise stop.interrupted("; finished parts are kept")

        yield advance


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
