"""Carry out trials: `carry_out` trains them, here, by several processes, and on several machines.

Every process goes through the same trials (`trials.py` hands them out) until all are done, so any of them
may be killed at any time: the others, or the next call, resume what it left.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.data import Dataset
from merit_lab.runs import RunInUse, durable
from merit_lab.study.check import check_trials
from merit_lab.study.cost import estimate
from merit_lab.study.progress import StudyProgress
from merit_lab.study.state import is_done
from merit_lab.study.trial import Trial, check_folders
from merit_lab.train import Interrupted
from merit_lab.train.parallel import Ranks
from merit_lab.train.signals import listening

_POLL_SECONDS = 1.0
_RULE = "a run is continued with the configuration that it started with"


class WorkersEnded(ChildProcessError):
    """All worker processes have ended before their trials were done."""


def carry_out(
    trials: Sequence[Trial],
    folder: Path,
    jobs: int = 1,
    storage: str | None = None,
    conclude: Callable[[], object] = lambda: None,
) -> None:
    """Train the trials that are not done, and return when all are: here, or by others that work on them too.

    After a signal or a kill the same call continues. Several processes and machines may make the same call:
    no trial is trained twice. Under torchrun all ranks train one trial at a time together.

    Args:
        trials: the trials, each in a folder below ``folder``; the first have priority.
        folder: the study's folder, on a file system that all its machines share.
        jobs: trials to train at the same time in this call.
        storage: URL of a database that holds the trials in place of a journal in the folder.
        conclude: called whenever a trial is done, to look at what is there; on the first rank.
    """
    ranks = Ranks.join()
    check_at_least("--jobs", jobs, 1)
    if jobs > 1 and ranks.size > 1:
        raise ValueError(
            f"--jobs is {jobs}, but the {ranks.size} processes of torchrun train one run at a time together; "
            "leave out --jobs, or start the command without torchrun"
        )
    if left := ranks.first(lambda: _begin(trials, folder, storage, ranks)):
        text = ranks.first(lambda: estimate(trials, jobs=jobs))
        if text and ranks.is_first:
            print(text, file=sys.stderr)
    jobs = min(jobs, left)
    if jobs > 1:
        _side_by_side(trials, folder, jobs, storage, conclude)
    else:
        _one_by_one(trials, folder, storage, ranks, conclude)


def _begin(trials: Sequence[Trial], folder: Path, storage: str | None, ranks: Ranks) -> int:
    """Check all trials and add them to the study; return how many are not done."""
    from merit_lab.study.trials import Trials

    datasets = {data: Dataset.open(data) for data in {trial.config.data for trial in trials}}
    for data, dataset in datasets.items():
        check_folders([trial for trial in trials if trial.config.data == data], dataset, _RULE)
    check_trials(trials, ranks)
    Trials(folder, storage).add(trials)
    return sum(not is_done(trial.folder) for trial in trials)


def _one_by_one(
    trials: Sequence[Trial],
    folder: Path,
    storage: str | None,
    ranks: Ranks,
    conclude: Callable[[], object] = lambda: None,
) -> None:
    """Train one trial after the other until all are done."""
    from merit_lab.study.trials import Trials

    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    held = Trials(folder, storage) if ranks.is_first else None
    waits = False
    while left := [trial for trial in trials if not ranks.first(lambda trial=trial: is_done(trial.folder))]:  # type: ignore[misc]
        with contextlib.ExitStack() as stack:
            taken = ranks.first(lambda: stack.enter_context(held.take(left)) if held else None)
            if taken is None:
                if not waits and any(not is_done(trial.folder) for trial in left):
                    console.print("waiting for trials that other processes train", style="bold")
                waits = True
                time.sleep(_POLL_SECONDS)
                continue
            waits = False
            place, verb = trials.index(taken) + 1, "resumes" if taken.exists else "starts"
            text = f"[{place} of {len(trials)}] {taken.folder.name} {verb}"
            console.print(text, style="bold", markup=False, soft_wrap=True)
            try:
                _train(taken)
            except RunInUse:  # by another command than a study's
                time.sleep(_POLL_SECONDS)
        ranks.first(conclude)


def _train(trial: Trial) -> None:
    from merit_lab.train import train

    train(trial.config, trial.folder, resume="auto")


def _side_by_side(
    trials: Sequence[Trial], folder: Path, jobs: int, storage: str | None, conclude: Callable[[], object]
) -> None:
    """Train in ``jobs`` worker processes, and show how far they are."""
    console = Console(stderr=True, highlight=False)
    done = sum(is_done(trial.folder) for trial in trials)
    with (
        _one_thread(),
        listening() as stop,
        StudyProgress(trials, console) as progress,
        _workers(trials, folder, jobs, storage) as workers,
    ):
        while True:
            some_left = any(worker.is_alive() for worker in workers)
            progress.show()
            before, done = done, sum(is_done(trial.folder) for trial in trials)
            if done > before:
                conclude()
            if done == len(trials):
                return
            if stop.signum:
                raise stop.interrupted(", with checkpoints")
            if not some_left:
                raise WorkersEnded(_last_words(workers, folder))
            time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _workers(
    trials: Sequence[Trial], folder: Path, jobs: int, storage: str | None
) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Processes that carry out the trials. Leaving the context ends them: a run writes its checkpoint."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    workers: list[multiprocessing.process.BaseProcess] = [
        context.Process(
            target=_work,
            args=(list(trials), folder, storage, place, jobs),
            name=f"worker-{place}",
            daemon=True,
        )
        for place in range(jobs)
    ]
    multiprocessing.resource_tracker.ensure_running()  # now, because starting it unblocks signals
    # Workers inherit what is blocked. Ctrl-C reaches the whole group, and this process ends them all.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield workers
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.join()


def _last_words(workers: Sequence[multiprocessing.process.BaseProcess], folder: Path) -> str:
    """Why the workers ended before their work did."""
    for worker in sorted(workers, key=lambda worker: worker.exitcode == 0):  # failed ones first
        if worker.exitcode == -signal.SIGKILL:
            return (
                "the workers ended before their runs did: killed by SIGKILL, most likely for lack of memory; "
                "run the command again with fewer --jobs"
            )
        log = folder / "logs" / f"{worker.name}.log"
        if lines := log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
            return f"the workers ended before their runs did; the last line of {log}: {lines[-1]}"
    return f"the workers ended before their runs did, with exit status {workers[0].exitcode}"


def _work(trials: list[Trial], folder: Path, storage: str | None, place: int, num: int) -> None:
    """Carry out trials in a worker process; what it prints goes to its log."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()
    if torch.cuda.is_available():
        _take_gpu(place, num)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num))
    log = folder / "logs" / f"worker-{place}.log"
    with log.open("a", encoding="utf-8", buffering=1) as file, contextlib.redirect_stderr(file):
        try:
            _one_by_one(trials, folder, storage, Ranks.join())
        except Interrupted:
            sys.exit(1)
        except Exception:
            traceback.print_exc(file=file)  # which ends with the line that the command shows
            sys.exit(1)


def _take_gpu(place: int, num: int) -> None:
    """Choose the GPU of one of ``num`` workers. Where some share one, they divide its memory."""
    import torch

    num_gpus = torch.cuda.device_count()
    gpu = place % num_gpus
    os.environ["LOCAL_RANK"] = str(gpu)  # which Ranks uses as the index of the GPU
    torch.cuda.set_per_process_memory_fraction(1 / len(range(gpu, num, num_gpus)), gpu)


def _end_with_parent() -> None:
    """Terminate this process when its parent ends, for whatever reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread here: the workers need the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def write_list(trials: Sequence[Trial], path: Path) -> None:
    """Write the trials for `merit train --list`, on a machine without Optuna: a line a run."""
    lines = [json.dumps({"name": trial.folder.name, **trial.config.to_dict()}) for trial in trials]
    durable.write(path, "".join(f"{line}\n" for line in lines))
