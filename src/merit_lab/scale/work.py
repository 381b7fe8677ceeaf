"""A scaling study from its plan to its findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merit_lab.scale.plan import Rates, Scaling
from merit_lab.study import Conclusion, hold
from merit_lab.train import TrainConfig


def scale(
    base: TrainConfig,
    folder: Path,
    *,
    target: float,
    batches: Sequence[int],
    rates: Rates,
    seeds: Sequence[int],
    jobs: int = 1,
) -> Conclusion | None:
    """Train with growing batches to a target loss, print the steps, and write the findings.

    They go into ``folder``/report. What is done stays done: the same call goes on after an interruption,
    and runs that are there are used for other targets too, as far as they reach.

    Args:
        base: what all runs share; its ``steps`` are the most that any run may take.
        folder: where the run directories are.
        target: the validation loss to reach.
        batches: batch sizes in sequences.
        rates: learning rates by optimizer and batch; of several the best is taken.
        seeds: each batch is trained once with each.
        jobs: runs at the same time.
    """
    study = Scaling(
        base=base, folder=folder, target=target, batches=sorted(batches), rates=rates, seeds=seeds
    )
    return hold(study, jobs)
