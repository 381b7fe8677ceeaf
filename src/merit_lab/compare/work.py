"""Runs are carried out one after the other; what is done stays done.

The ledger is the run directories themselves: a run that finished or diverged is not repeated, one that
was interrupted or killed goes on from its last checkpoint, one that another process works on is left to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from merit_lab.compare.plan import PlannedRun, plan
from merit_lab.record import Run, RunInUse
from merit_lab.report import Report, find_runs, print_outcomes, write_report
from merit_lab.train import TrainConfig, train
from merit_lab.train.optimizer import check_optimizer
from merit_lab.train.parallel import Ranks

_WORDS = {
    "planned": "begins",
    "interrupted": "goes on",
    "unfinished": "goes on",
    "finished": "is there already",
    "diverged": "diverged before and is not repeated",
    "running": "is being worked on by another process and is left to it",
}


def compare(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Mapping[str, Sequence[float]],
) -> Report | None:
    """Train with every optimizer and seed, print the table, and write the report into ``folder``/report.

    Under torchrun only the first rank reports; the others return None.
    """
    ranks = Ranks.join()
    planned = plan(base, folder, optimizers=optimizers, seeds=seeds, learning_rates=learning_rates)
    carry_out(planned, ranks)
    if not ranks.is_first:
        return None
    report = write_report(find_runs([own.folder for own in planned]), folder / "report")
    print_outcomes(report.outcomes)
    return report


def carry_out(planned: Sequence[PlannedRun], ranks: Ranks) -> None:
    """Do what is left of the planned runs. When a signal stops it, the same call goes on."""
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)

    def say(place: int, status: str) -> None:
        text = f"[{place} of {len(planned)}] {planned[place - 1].folder.name} {_WORDS[status]}"
        console.print(text, style="bold", markup=False, soft_wrap=True)

    new = {(own.config.model, own.config.optimizer): own.config for own in planned if not own.exists}
    for config in new.values():  # now, not after hours of the others' training
        check_optimizer(config)
    for place, own in enumerate(planned, start=1):
        # One rank looks for all: another may be at the run directory already.
        status = ranks.first(partial(_status, own))
        say(place, status)
        if status in ("planned", "interrupted", "unfinished"):
            try:
                train(own.config, own.folder, resume=status != "planned")
            except RunInUse:  # another process took it since
                say(place, "running")
            except FileExistsError:  # and has done it already
                if not own.exists:
                    raise
                say(place, ranks.first(partial(_status, own)))


def _status(planned: PlannedRun) -> str:
    return Run.open(planned.folder).status if planned.exists else "planned"
