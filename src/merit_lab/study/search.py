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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.data import Dataset
from merit_lab.runs import RunInUse, durable
from merit_lab.study.cost import duration, estimate
from merit_lab.study.state import is_done
from merit_lab.study.trial import Trial, check_folders
from merit_lab.study.trials import Trials
from merit_lab.train.jobs import hand_out
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
    left = ranks.first(lambda: _begin(trials, folder, storage, ranks))
    if left and (text := ranks.first(lambda: estimate(trials, jobs=jobs))) and ranks.is_first:
        print(text, file=sys.stderr)
    if min(jobs, left) > 1:
        _side_by_side(trials, folder, min(jobs, left), storage, conclude)
    else:
        _one_by_one(trials, folder, storage, ranks, conclude)


def _begin(trials: Sequence[Trial], folder: Path, storage: str | None, ranks: Ranks) -> int:
    """Check all trials and add them to the study; return how many are not done."""
    datasets = {data: Dataset.open(data) for data in {trial.config.data for trial in trials}}
    check_folders(trials, datasets)
    checked = set()
    for trial in trials:
        config = dataclasses.replace(trial.config, seed=0)  # a seed changes nothing here
        if config not in checked and not is_done(trial.folder):
            try:
                check_run(config, datasets[config.data], ranks)
            except ValueError as error:
                raise ValueError(f"the run {trial.folder.name} cannot be trained: {error}") from error
            checked.add(config)
    Trials(folder, storage).add(trials)
    return sum(not is_done(trial.folder) for trial in trials)


def _one_by_one(
    trials: Sequence[Trial],
    folder: Path,
    storage: str | None,
    ranks: Ranks,
    conclude: Callable[[], object] = lambda: None,
) -> None:
    """Train one trial after the other in this process until all are done."""
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    held = Trials(folder, storage) if ranks.is_first else None
    pool, waits = Pool(), False

    def take(left: Sequence[Trial], stack: contextlib.ExitStack) -> Trial | None:
        return stack.enter_context(held.take(left)) if held else None

    while left := ranks.first(lambda: [trial for trial in trials if not is_done(trial.folder)]):
        with contextlib.ExitStack() as stack:
            taken = ranks.first(partial(take, left, stack))
            if taken is not None:
                waits = False
                place, verb = trials.index(taken) + 1, "resumes" if taken.exists else "starts"
                text = f"[{place} of {len(trials)}] {taken.folder.name} {verb}"
                console.print(text, style="bold", markup=False, soft_wrap=True)
                with contextlib.suppress(RunInUse):  # by another command than a study's
                    train(taken.config, taken.folder, pool=pool)
        if taken is not None and ranks.first(partial(is_done, taken.folder)):
            ranks.first(conclude)
            continue
        if not waits:
            console.print("waiting for trials that other processes train", style="bold")
        waits = True
        time.sleep(_POLL_SECONDS)


def _side_by_side(
    trials: Sequence[Trial], folder: Path, num: int, storage: str | None, conclude: Callable[[], object]
) -> None:
    """Train in ``num`` processes. This one holds the trials that they train."""
    console = Console(stderr=True, highlight=False)
    held, failed = Trials(folder, storage), dict[Path, str]()
    taken: dict[Path, contextlib.ExitStack] = {}
    began, num_here = time.monotonic(), 0

    def left() -> list[Trial]:
        return [one for one in trials if not (is_done(one.folder) or one.folder in failed)]

    with contextlib.ExitStack() as everything:

        def draw() -> Iterator[tuple[Path, object]]:
            while True:
                stack = everything.enter_context(contextlib.ExitStack())
                trial = stack.enter_context(held.take([one for one in left() if one.folder not in taken]))
                if trial is None:
                    return
                taken[trial.folder] = stack
                yield trial.folder, trial.config

        while left():
            for done in hand_out(draw(), num, folder / "logs"):  # type: ignore[arg-type]
                taken.pop(done.folder).close()
                if done.status == "failed":
                    failed[done.folder] = done.error
                num_here += done.status != "in use"
                if is_done(done.folder):
                    conclude()
                to_do = len(left())
                seconds = (time.monotonic() - began) * to_do / max(1, num_here)
                text = f"[{len(trials) - to_do} of {len(trials)}] {done.folder.name} {done.status}"
                console.print(
                    text + (f", about {duration(seconds)} left" if to_do else ""),
                    markup=False,
                    soft_wrap=True,
                )
            if left():
                time.sleep(_POLL_SECONDS)
    if failed:
        folder_, error = next(iter(failed.items()))
        raise ChildProcessError(f"{len(failed)} runs failed; {folder_.name}: {error}")


def write_list(trials: Sequence[Trial], path: Path) -> None:
    """Write the trials for `merit train --list`, on a machine without Optuna: a line a run."""
    lines = [json.dumps({"name": trial.folder.name, **trial.config.to_dict()}) for trial in trials]
    durable.write(path, "".join(f"{line}\n" for line in lines))
