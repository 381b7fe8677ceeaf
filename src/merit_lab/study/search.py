"""Carry out trials: `carry_out` trains them, here, by several processes, and on several machines.

Every call goes through the same trials (`trials.py` hands them out) until all are done, so any of them may be
killed at any time: the others, or the next call, resume what it left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.data import Dataset
from merit_lab.runs import RunInUse, durable
from merit_lab.study.cost import duration, estimate
from merit_lab.study.trial import Trial, check_folders
from merit_lab.study.trials import Trials
from merit_lab.train.jobs import Done, Job, hand_out
from merit_lab.train.loop import train
from merit_lab.train.parallel import Ranks
from merit_lab.train.pool import Pool
from merit_lab.train.start import check_run

_POLL_SECONDS = 1.0


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
        jobs: trials to train at the same time in this call. If a trial fails, the others are trained first;
            with one job its error is raised at once.
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
    jobs = min(jobs, ranks.first(lambda: _begin(trials, folder, storage, ranks, jobs)))
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    held = Trials(folder, storage) if ranks.is_first else None
    taken: dict[Path, contextlib.ExitStack] = {}
    failed: dict[Path, str] = {}
    pool, began, num_here, waits = Pool(), time.monotonic(), 0, False

    def say(place: int, text: str) -> None:
        console.print(f"[{place} of {len(trials)}] {text}", markup=False, soft_wrap=True)

    def left() -> list[Trial]:
        return [trial for trial in trials if not (trial.is_done or trial.folder in failed)]

    with contextlib.ExitStack() as everything:

        def take(but: Collection[Path]) -> Trial | None:
            stack = everything.enter_context(contextlib.ExitStack())
            free = [trial for trial in left() if trial.folder not in taken and trial.folder not in but]
            trial = stack.enter_context(held.take(free)) if held else None
            if trial is not None:
                taken[trial.folder] = stack
                say(trials.index(trial) + 1, f"{trial.folder.name} {'resumes' if trial.exists else 'starts'}")
            return trial

        while ranks.first(left):
            busy: set[Path] = set()  # what another command than a study's trains

            def draw(busy: set[Path] = busy) -> Iterator[Job]:
                while trial := ranks.first(lambda: take(busy)):
                    yield trial.folder, trial.config

            for done in hand_out(draw(), jobs, folder / "logs") if jobs > 1 else _train(draw(), pool):
                waits = False
                if done.status == "in use":
                    busy.add(done.folder)
                else:
                    num_here += 1
                if done.status == "failed":
                    failed[done.folder] = done.error
                if ranks.is_first:
                    taken.pop(done.folder).close()
                    to_do = len(left())
                    seconds = (time.monotonic() - began) * to_do / max(1, num_here)
                    rest = f", about {duration(seconds)} left" if to_do else ""
                    say(len(trials) - to_do, f"{done.folder.name} {done.status}{rest}")
                if done.status not in ("failed", "in use"):
                    ranks.first(conclude)
            if ranks.first(left):
                if not waits:
                    console.print("waiting for trials that other processes train", style="bold")
                waits = True
                time.sleep(_POLL_SECONDS)
    if failed:
        path, error = next(iter(failed.items()))
        raise ChildProcessError(f"{len(failed)} runs failed; {path.name}: {error}")


def _begin(trials: Sequence[Trial], folder: Path, storage: str | None, ranks: Ranks, jobs: int) -> int:
    """Check all trials, add them to the study, and say what they take; return how many are not done."""
    datasets = {data: Dataset.open(data) for data in {trial.config.data for trial in trials}}
    check_folders(trials, datasets)
    left, checked = [trial for trial in trials if not trial.is_done], set()
    for trial in left:
        config = dataclasses.replace(trial.config, seed=0)  # a seed changes nothing here
        if config not in checked:
            try:
                check_run(config, datasets[config.data], ranks)
            except ValueError as error:
                raise ValueError(f"the run {trial.folder.name} cannot be trained: {error}") from error
            checked.add(config)
    Trials(folder, storage).add(trials)
    if text := estimate(trials, jobs):
        print(text, file=sys.stderr)
    return len(left)


def _train(jobs: Iterable[Job], pool: Pool) -> Iterator[Done]:
    """Train one trial after the other in this process."""
    for folder, config in jobs:
        status = "in use"
        with contextlib.suppress(RunInUse):
            status = train(config, folder, pool=pool).status
        yield Done(folder, status)


def write_list(trials: Sequence[Trial], path: Path) -> None:
    """Write the trials for `merit train --list`, on a machine without Optuna: a line a run."""
    lines = [json.dumps({"name": trial.folder.name, **trial.config.to_dict()}) for trial in trials]
    durable.write(path, "".join(f"{line}\n" for line in lines))
