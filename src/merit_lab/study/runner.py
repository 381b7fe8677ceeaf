"""Trials are carried out one after the other; what is done stays done.

The ledger is the run directories themselves: a run that finished or diverged is not repeated, one that
was interrupted or killed goes on from its last checkpoint, one that another process works on is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from merit_lab.record import RunInUse
from merit_lab.study.trial import Trial
from merit_lab.train import train
from merit_lab.train.optimizer import check_optimizer
from merit_lab.train.parallel import Ranks

_WORDS = {
    "planned": "begins",
    "interrupted": "goes on",
    "unfinished": "goes on",
    "finished": "is there already",
    "diverged": "diverged before and is not repeated",
    "abandoned": "was given up before and is not repeated",
    "running": "is being worked on by another process and is left to it",
}


def carry_out(trials: Sequence[Trial], ranks: Ranks) -> None:
    """Do what is left of the trials, one after the other. When a signal stops it, the same call goes on."""
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)

    def say(place: int, status: str) -> None:
        text = f"[{place} of {len(trials)}] {trials[place - 1].folder.name} {_WORDS[status]}"
        console.print(text, style="bold", markup=False, soft_wrap=True)

    check_optimizers(trials)
    for place, own in enumerate(trials, start=1):
        # One rank looks for all: another may be at the run directory already.
        status = ranks.first(partial(_status, own))
        say(place, status)
        if status in ("planned", "interrupted", "unfinished"):
            try:
                train(own.config, own.folder, resume=status != "planned", bars=own.bars)
            except RunInUse:  # another process took it since
                say(place, "running")
            except FileExistsError:  # and has done it already
                if not own.exists:
                    raise
                say(place, ranks.first(partial(_status, own)))


def check_optimizers(trials: Sequence[Trial]) -> None:
    """Raise where an optimizer cannot be made as configured: now, not after hours of the others' training."""
    new = {(own.config.model, own.config.optimizer): own.config for own in trials if not own.exists}
    for config in new.values():
        check_optimizer(config)


def _status(trial: Trial) -> str:
    return trial.status
