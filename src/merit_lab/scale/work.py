"""A scaling study from its plan to its findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merit_lab.scale.plan import Rates, Scaling
from merit_lab.study import Conclusion, run_study
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
    """Train with growing batches to a target loss, print the steps, and write ``folder``/report.

    Finished runs are not repeated: after an interruption the same call continues. Existing runs are also used
    for other targets if they are long enough.

    Args:
        base: configuration that all runs share; its ``steps`` are the limit of every run.
        folder: folder of the run directories.
        target: the validation loss to reach.
        batches: batch sizes in sequences.
        rates: learning rates by optimizer and batch; the best of several is used.
        seeds: each batch is trained once with every seed.
        jobs: number of runs to train at the same time.
    """
    study = Scaling(
        base=base, folder=folder, target=target, batches=sorted(batches), rates=rates, seeds=seeds
    )
    return run_study(study, jobs)
