"""The runs of an arena: their losses, and the losses at which further ones are abandoned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from merit_lab.results.gather import MeasuredRun
from merit_lab.runs import OVER, Run, run_folders
from merit_lab.study.trial import Trial
from merit_lab.train import Bar

_CHECKS = (1 / 3, 1 / 2, 2 / 3)  # shares of a tuning run after which it may be abandoned


@dataclass(frozen=True)
class Runs:
    """The existing runs of an arena, by the names of their directories."""

    by_name: Mapping[str, MeasuredRun]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read the runs in a folder."""
        return cls({path.name: MeasuredRun.read(Run.open(path)) for path in run_folders(folder)})

    def of(self, trial: Trial) -> MeasuredRun | None:
        return self.by_name.get(trial.folder.name)

    def loss(self, trial: Trial) -> float | None:
        """The final validation loss; None for a run that is not done.

        It is infinite for a run that diverged or was abandoned: neither can be the best.
        """
        run = self.of(trial)
        if run is None or run.status not in OVER:
            return None
        losses = run.curves.get("validation_loss", [])
        return losses[-1][1] if run.status == "finished" and losses else math.inf


def bars_of(runs: Sequence[MeasuredRun]) -> tuple[Bar, ...]:
    """The losses above which a tuning run is abandoned: it needs over twice the steps of the best run.

    After a third, a half and two thirds of the steps, its loss must be below that of the best finished run at
    half as many steps. A rate that is far too high or too low fails this. A rate that is a little too high,
    which starts slowly and ends low, passes.
    """
    finished = [run for run in runs if run.status == "finished" and run.points("validation_loss")]
    if not finished:
        return ()
    losses = min((run.points("validation_loss") for run in finished), key=lambda curve: curve[-1][1])
    last = losses[-1][0]
    steps = {step for share in _CHECKS if (step := _first(losses, share * last)) is not None}
    return tuple(Bar(step, _at(losses, step / 2)) for step in sorted(steps) if step < last)


def _first(losses: Sequence[tuple[int, float]], step: float) -> int | None:
    """The step of the first validation at or after a step."""
    return next((validated for validated, _ in losses if validated >= step), None)


def _at(losses: Sequence[tuple[int, float]], step: float) -> float:
    """The loss at a step, interpolated linearly between validations."""
    for (before, higher), (after, lower) in pairwise(losses):
        if before <= step <= after:
            return higher + (lower - higher) * (step - before) / (after - before)
    return losses[-1][1]
