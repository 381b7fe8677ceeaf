"""Several runs at the same time, each by a process of its own, on a core or a GPU.

Every worker goes through the same list of runs and takes those that nobody has: the run directories'
locks decide. What a worker shows goes to its log; the caller is told how far all of them are.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from merit_lab.record import Run, holds_run, is_locked
from merit_lab.study.runner import carry_out
from merit_lab.study.trial import Trial
from merit_lab.train import Interrupted
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import StopRequest

_POLL_SECONDS = 1.0
_BLOCK = 1 << 14  # bytes of the end of a metrics file that are read first
_DONE: set[Path] = set()
_OVER = ("finished", "diverged", "abandoned")


class WorkersEnded(ChildProcessError):
    """All workers are gone and their runs are not done."""


class Workers:
    """Processes that carry out runs together. As a context manager it leaves none behind.

    Args:
        runs: what is left to do.
        num: how many processes.
        logs: folder for what they show.
    """

    def __init__(self, runs: Sequence[Trial], num: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._runs = runs
        self._logs = [logs / f"worker-{place}.log" for place in range(num)]
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=_work, args=(list(runs), place, num, log), daemon=True)
            for place, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.terminate()  # SIGTERM: a run writes its checkpoint and ends
            process.join()

    def waiting(self, wanted: Sequence[Trial], stop: StopRequest) -> Iterator[None]:
        """Come back now and then until the wanted runs are done.

        Raises Interrupted when a signal came, and WorkersEnded when the workers ended before.
        """
        while not all(is_done(own.folder) for own in wanted):
            if stop.signum:
                raise Interrupted(stop.signum, "stopped by a signal, with checkpoints")
            had_ended = not any(process.is_alive() for process in self._processes)
            if had_ended and not all(is_done(own.folder) for own in wanted):
                raise WorkersEnded(f"the workers ended before their runs did; {self._last_words()}")
            yield
            time.sleep(_POLL_SECONDS)

    def _last_words(self) -> str:
        workers = zip(self._processes, self._logs, strict=True)
        # First one that failed: to it, one that ended well may have left the run that is not done.
        for _, log in sorted(workers, key=lambda own: own[0].exitcode == 0):
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
            if lines:
                return f"the last line of {log}: {lines[-1]}"
        return "they left no word"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The cores are the workers': threads beside them would wait for one another at every product."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_done(folder: Path) -> bool:
    """Whether a run has come to its end, good or bad. What is done once stays so and is not read again."""
    folder = folder.resolve()  # what is remembered must not depend on the current folder
    if not holds_run(folder):
        return False
    if folder not in _DONE and not is_locked(folder) and Run.open(folder).outcome in _OVER:
        _DONE.add(folder)
    return folder in _DONE


def progress(run: Trial) -> tuple[int, float] | None:
    """Steps done and the last training loss of a run that is being worked on; None if it is not."""
    return last_step(run) if run.exists and is_locked(run.folder) else None


def last_step(run: Trial) -> tuple[int, float]:
    """Steps done and the last training loss of a run; none where there is no run yet.

    It is asked every second, so only the end of the file is read, as far back as a training line needs.
    """
    path = run.folder / "metrics.jsonl"
    end = path.stat().st_size if path.exists() else 0
    begin, size = end, _BLOCK
    while begin > 0:
        begin, size = max(0, end - size), 4 * size
        for line in reversed(_whole_lines(path, begin, end)):
            row = json.loads(line)
            if row["kind"] == "train":
                return row["step"], float(row["loss"])  # which may be "nan" there
    return 0, math.nan


def _whole_lines(path: Path, begin: int, end: int) -> list[bytes]:
    """The lines between two places of a file, without those that are cut there."""
    with path.open("rb") as file:
        file.seek(begin)
        *lines, _ = file.read(end - begin).split(b"\n")
    return lines[1:] if begin > 0 else lines


def _end_with_parent() -> None:
    """Ask this process to end when the one that started it has, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _work(runs: list[Trial], place: int, num: int, log: Path) -> None:
    """The life of a worker."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    if torch.cuda.is_available():
        # Which Ranks takes for the GPU's number. Where there are more workers, some share one: small models
        # leave it idle between their steps.
        os.environ["LOCAL_RANK"] = str(place % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num))
    with log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            # Each begins elsewhere in the list, so that they meet less often.
            carry_out(runs[place:] + runs[:place], Ranks.join())
        except (Interrupted, KeyboardInterrupt):
            sys.exit(1)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=file)
            raise
