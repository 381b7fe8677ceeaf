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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    jobs = min(jobs, ranks.first(lambda: _begin(trials, folder, storage, ranks)))
    pool = Pool()
    with Trials(folder, storage) if ranks.is_first else contextlib.nullcontext() as held:
        work = _Work(trials, ranks, held)
        while ranks.first(work.left):
            drawn = work.draw()
            for done in hand_out(drawn, jobs, folder / "logs") if jobs > 1 else _train(drawn, pool):
                work.note(done)
                if done.status not in ("failed", "in use"):
                    ranks.first(conclude)
            if ranks.first(work.left):
                work.wait()
    if work.failed:
        path, error = next(iter(work.failed.items()))
        raise ChildProcessError(f"{len(work.failed)} runs failed; {path.name}: {error}")


@dataclass
class _Work:
    """The trials of a call: what is left of them, and what is said. Only the first rank holds some."""

    trials: Sequence[Trial]
    ranks: Ranks
    held: Trials | None
    failed: dict[Path, str] = field(default_factory=dict)
    busy: set[Path] = field(default_factory=set)  # what another command than a study's trains
    num_here: int = 0
    waits: bool = False
    began: float = field(default_factory=time.monotonic)

    def left(self) -> list[Trial]:
        """The trials that are yet to train, here or elsewhere."""
        return [trial for trial in self.trials if not (trial.is_done or trial.folder in self.failed)]

    def draw(self) -> Iterator[Job]:
        """Take one trial after the other, until others have all that are left."""
        self.busy.clear()
        while trial := self.ranks.first(self._take):
            yield trial.folder, trial.config

    def _take(self) -> Trial | None:
        assert self.held is not None
        trial = self.held.take(trial for trial in self.left() if trial.folder not in self.busy)
        if trial is not None:
            place = self.trials.index(trial) + 1
            self._say(place, f"{trial.folder.name} {'resumes' if trial.exists else 'starts'}")
        return trial

    def note(self, done: Done) -> None:
        """Release a trial, and say what became of it."""
        if self.held is None:
            return
        self.waits = False
        if done.status == "in use":
            self.busy.add(done.folder)
        else:
            self.num_here += 1
        if done.status == "failed":
            self.failed[done.folder] = done.error
        self.held.release(next(trial for trial in self.trials if trial.folder == done.folder))
        num_left = len(self.left())
        seconds = (time.monotonic() - self.began) * num_left / max(1, self.num_here)
        rest = f", about {duration(seconds)} left" if num_left else ""
        self._say(len(self.trials) - num_left, f"{done.folder.name} {done.status}{rest}")

    def wait(self) -> None:
        """Wait a moment for those who train what is left."""
        if self.held is not None and not self.waits:
            print("waiting for trials that other processes train", file=sys.stderr)
        self.waits = True
        time.sleep(_POLL_SECONDS)

    def _say(self, place: int, text: str) -> None:
        print(f"[{place} of {len(self.trials)}] {text}", file=sys.stderr)


def _begin(trials: Sequence[Trial], folder: Path, storage: str | None, ranks: Ranks) -> int:
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
    if text := estimate(trials):
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
