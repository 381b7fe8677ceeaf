"""Carry out trials one after the other, without repeating those that are done.

The run directories hold the state: a run that finished or diverged is not repeated, one that was
interrupted or killed resumes from its last checkpoint, and one that another process works on is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from merit_lab.runs import OVER, RunInUse
from merit_lab.study.trial import Trial
from merit_lab.train import train
from merit_lab.train.parallel import Ranks

_STATUS_TEXT = {
    "planned": "starts",
    "interrupted": "resumes",
    "unfinished": "resumes",
    "finished": "is already done",
    "diverged": "diverged before and is not repeated",
    "abandoned": "was abandoned before and is not repeated",
    "running": "is in use by another process and is skipped",
}


def carry_out(trials: Sequence[Trial], ranks: Ranks) -> None:
    """Carry out the remaining trials, one after the other. After a signal, the same call continues."""
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)

    def say(place: int, status: str) -> None:
        text = f"[{place} of {len(trials)}] {trials[place - 1].folder.name} {_STATUS_TEXT[status]}"
        console.print(text, style="bold", markup=False, soft_wrap=True)

    for place, trial in enumerate(trials, start=1):
        # One rank reads it for all: another one may already have created the run directory.
        status = ranks.first(partial(_status, trial))
        say(place, status)
        if status not in ("running", *OVER):
            try:
                resume = status != "planned"
                train(trial.config, trial.folder, resume=resume)
            except RunInUse:  # another process has just taken it
                say(place, "running")
            except FileExistsError:  # another process has finished it
                if not trial.exists:
                    raise
                say(place, ranks.first(partial(_status, trial)))


def _status(trial: Trial) -> str:
    return trial.status
