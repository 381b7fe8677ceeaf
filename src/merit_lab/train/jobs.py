"""Train many runs in several processes, each with a pool of its own.

Run directories hold all state: a run that is over is not trained again, one that was interrupted or killed
goes on from its checkpoint, and one whose lock another process holds, here or elsewhere, is left to it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Self

from merit_lab.runs import OVER, Run, RunInUse, holds_run
from merit_lab.train.config import TrainConfig
from merit_lab.train.loop import train
from merit_lab.train.pool import Pool
from merit_lab.train.signals import Interrupted, StopRequest, listening

Job = tuple[Path, TrainConfig]
"""A run directory, and what to train there."""

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Done:
    """What became of a job: "finished", "diverged", "in use" elsewhere, or "failed" with an error."""

    folder: Path
    status: str
    error: str = ""


def hand_out(jobs: Iterable[Job], num: int, logs: Path) -> Iterator[Done]:
    """Train jobs in ``num`` processes, and yield what became of each, as they end.

    A job is taken from ``jobs`` when a process is free for it. One whose process is killed is begun again,
    once. After a signal the processes write their checkpoints, and ``Interrupted`` is raised.

    Args:
        jobs: what to train; may be drawn while others train.
        num: the number of processes. With one, this process trains.
        logs: folder for what the processes print, worker-0.log and so on.
    """
    if num == 1:
        pool = Pool()
        for folder, config in jobs:
            yield carry_out(pool, folder, config)
        return
    logs.mkdir(parents=True, exist_ok=True)
    with listening() as stop, _Workers(num, logs) as workers:
        yield from workers.hand_out(iter(jobs), stop)


def carry_out(pool: Pool, folder: Path, config: TrainConfig) -> Done:
    """Train one job, unless it is over or in use; an error of this run alone is returned."""
    try:
        if holds_run(folder) and (status := Run.open(folder).status) in (*OVER, "running"):
            return Done(folder, "in use" if status == "running" else status)
        return Done(folder, train(config, folder, pool=pool).status)
    except RunInUse:  # another process has just taken it
        return Done(folder, "in use")
    except Interrupted:
        raise
    except Exception as error:
        traceback.print_exc()
        if "CUDA" in str(error) and not isinstance(error, ValueError):
            raise  # what follows in this process cannot be trusted
        return Done(folder, "failed", f"{type(error).__name__}: {error}")


class _Worker(NamedTuple):
    """A process, which trains what comes through the pipe."""

    process: BaseProcess
    pipe: Connection
    place: int
    log: Path

    @classmethod
    def begin(cls, place: int, num: int, log: Path) -> _Worker:
        """Start the process of one place out of ``num``."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, place, num, log), daemon=True)
        process.start()
        theirs.close()
        return cls(process, pipe, place, log)

    def last_words(self) -> str:
        """Why the process ended."""
        code, log = self.process.exitcode or 0, self.log
        if code == -signal.SIGKILL:
            return "its process was killed by SIGKILL twice, most likely for lack of memory: use fewer --jobs"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        last = f"; the last line of {log}: {lines[-1]}" if lines else ""
        return f"its process ended twice, at last with status {code}{last}"


class _Workers:
    """The processes, started when there is a job for them; leaving the context ends them."""

    def __init__(self, num: int, logs: Path) -> None:
        self.num, self.logs = num, logs
        self.idle: list[_Worker] = []
        self.busy: dict[Connection, tuple[_Worker, Job]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        busy = [worker for worker, _ in self.busy.values()]
        for worker in busy:
            worker.process.terminate()  # the run writes its checkpoint
        for worker in (*busy, *self.idle):
            worker.pipe.close()  # an idle one ends
            worker.process.join()

    def hand_out(self, jobs: Iterator[Job], stop: StopRequest) -> Iterator[Done]:
        """Give a job to every free process, and yield what became of them."""
        again: deque[Job] = deque()
        begun_twice: set[Path] = set()
        while not stop.signum:
            while len(self.busy) < self.num and (job := again.popleft() if again else next(jobs, None)):
                worker = self.idle.pop() if self.idle else self._begin()
                worker.pipe.send(job)
                self.busy[worker.pipe] = worker, job
            if not self.busy:
                return
            for pipe in wait(list(self.busy), timeout=_POLL_SECONDS):
                assert isinstance(pipe, Connection)
                worker, job = self.busy.pop(pipe)
                try:
                    done = pipe.recv()
                    self.idle.append(worker)
                except (EOFError, ConnectionError):
                    worker.process.join()
                    if job[0] not in begun_twice:
                        begun_twice.add(job[0])
                        again.append(job)
                        continue
                    done = Done(job[0], "failed", worker.last_words())
                yield done
        raise stop.interrupted(", with checkpoints")

    def _begin(self) -> _Worker:
        busy = {worker.place for worker, _ in self.busy.values()}
        place = min(set(range(self.num)) - busy)  # if a process is begun, none is idle
        return _Worker.begin(place, self.num, self.logs / f"worker-{place}.log")


def _work(pipe: Connection, place: int, num: int, log: Path) -> None:
    """Train what comes through the pipe, until it is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    take_device(place, num)
    with log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stderr(file):
        pool = Pool()
        with contextlib.suppress(EOFError, KeyboardInterrupt, Interrupted):
            while True:
                folder, config = pipe.recv()
                pipe.send(carry_out(pool, folder, config))


def take_device(place: int, num: int) -> None:
    """Choose the GPU of one of ``num`` processes, or its share of the cores.

    With more processes than GPUs some share one: small models leave it idle between steps.
    """
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num))
        return
    num_gpus = torch.cuda.device_count()
    gpu = place % num_gpus
    os.environ["LOCAL_RANK"] = str(gpu)  # which Ranks uses as the index of the GPU
    # Those that share a GPU divide its memory: each looks for the largest micro-batch that fits.
    torch.cuda.set_per_process_memory_fraction(1 / len(range(gpu, num, num_gpus)), gpu)


def _end_with_parent() -> None:
    """Terminate this process when its parent ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
