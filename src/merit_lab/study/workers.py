"""Several runs at the same time, each in its own process, on a core or a GPU.

Every worker goes through the same list of runs and takes those that no other process works on; the locks of
the run directories decide. The output of a worker goes to its log.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from merit_lab.runs import is_locked
from merit_lab.study.runner import carry_out
from merit_lab.study.state import is_done
from merit_lab.study.trial import Trial
from merit_lab.train import Interrupted
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import StopRequest

_POLL_SECONDS = 1.0


class WorkersEnded(ChildProcessError):
    """All workers have ended before their runs were done."""


class Workers:
    """Processes that carry out runs together. Leaving the context waits until all of them have ended.

    Args:
        runs: the runs that are not done.
        num: number of processes.
        logs: folder for their output.
    """

    def __init__(self, runs: Sequence[Trial], num: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"worker-{place}.log" for place in range(num)]
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=_work, args=(list(runs), place, num, log), daemon=True)
            for place, log in enumerate(self._logs)
        ]
        self._killed: list[SpawnProcess] = []

    def __enter__(self) -> Self:
        resource_tracker.ensure_running()  # now, because starting it unblocks signals
        # Workers inherit what is blocked. Ctrl-C reaches the whole group, and this process ends them all.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for process in self._processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            if kind is not None:
                process.terminate()  # SIGTERM: a run writes its checkpoint and ends
            process.join()

    def waiting(self, wanted: Sequence[Trial], stop: StopRequest) -> Iterator[None]:
        """Yield once per poll until the wanted runs are done, here or by other processes that work on them.

        Raises Interrupted after a signal, and WorkersEnded if all workers end and leave a run to nobody.
        """
        while not all(is_done(trial.folder) for trial in wanted):
            if stop.signum:
                raise stop.interrupted(", with checkpoints")
            had_ended = not any(process.is_alive() for process in self._processes)
            self._record_killed()
            if had_ended and any(not is_locked(one.folder) and not is_done(one.folder) for one in wanted):
                raise WorkersEnded(f"the workers ended before their runs did; {self._last_words()}")
            yield
            time.sleep(_POLL_SECONDS)

    def _record_killed(self) -> None:
        """Add the signal to the log of each worker that one has ended, which could not write it itself."""
        for process, log in zip(self._processes, self._logs, strict=True):
            code = process.exitcode or 0  # below 0 after a signal
            if code < 0 and process not in self._killed:
                self._killed.append(process)
                with log.open("a", encoding="utf-8") as file:
                    print(_cause(-code), file=file)

    def _last_words(self) -> str:
        workers = zip(self._processes, self._logs, strict=True)
        # Failed workers first: a worker that succeeded may have left the unfinished run to one that failed.
        for _, log in sorted(workers, key=lambda worker: worker[0].exitcode == 0):
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
            if lines:
                return f"the last line of {log}: {lines[-1]}"
        return "their logs are empty"


def _cause(signum: int) -> str:
    """Why a worker ended, by the signal that ended it."""
    name = next((one.name for one in signal.Signals if one == signum), f"signal {signum}")
    if name == "SIGKILL":
        return "killed by SIGKILL, most likely for lack of memory; run the command again with fewer --jobs"
    return f"ended by {name}; run the command again to continue"


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the workers need the cores, and more threads would wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _end_with_parent() -> None:
    """Terminate this process when its parent ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _take_gpu(place: int, num: int) -> None:
    """Choose the GPU of one of ``num`` workers.

    With more workers than GPUs some share one: small models leave it idle between steps.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    gpu = place % num_gpus
    os.environ["LOCAL_RANK"] = str(gpu)  # which Ranks uses as the index of the GPU
    # The workers that share a GPU divide its memory: each looks for the largest micro-batch that fits.
    torch.cuda.set_per_process_memory_fraction(1 / len(range(gpu, num, num_gpus)), gpu)


def _work(runs: list[Trial], place: int, num: int, log: Path) -> None:
    """Carry out runs in a worker process."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    if torch.cuda.is_available():
        _take_gpu(place, num)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num))
    with log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            # Workers start at different places in the list, so that they compete less for the same run.
            carry_out(runs[place:] + runs[:place], Ranks.join())
        except Interrupted:
            sys.exit(1)
        except Exception:
            traceback.print_exc(file=file)  # which ends with the line that the command shows
            sys.exit(1)
