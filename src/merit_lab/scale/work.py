"""A scaling study from its plan to its findings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from merit_lab.record import RunInUse
from merit_lab.report import print_table
from merit_lab.scale.measure import unfinished
from merit_lab.scale.plan import Rates, Study
from merit_lab.scale.words import steps_table
from merit_lab.scale.write import Findings, write_findings
from merit_lab.study import conduct
from merit_lab.train import TrainConfig
from merit_lab.train.parallel import Ranks


def scale(
    base: TrainConfig,
    folder: Path,
    *,
    target: float,
    batches: Sequence[int],
    rates: Rates,
    seeds: Sequence[int],
    jobs: int = 1,
) -> Findings | None:
    """Train with growing batches to a target loss, print the steps, and write the findings.

    They go into ``folder``/report. What is done stays done: the same call goes on after an interruption,
    and runs that are there are used for other targets too, as far as they reach. Under torchrun only the
    first rank reports; the others return None.

    Args:
        base: what all runs share; its ``steps`` are the most that any run may take.
        folder: where the run directories are.
        target: the validation loss to reach.
        batches: batch sizes in sequences.
        rates: learning rates by optimizer and batch; of several the best is taken.
        seeds: each batch is trained once with each.
        jobs: runs at the same time.
    """
    ranks = Ranks.join()
    study = Study(base=base, folder=folder, target=target, batches=sorted(batches), rates=rates, seeds=seeds)
    conduct(study, ranks, jobs)
    measurements = study.measure(study.next().trials)
    if names := unfinished(measurements):
        raise RunInUse(
            f"{', '.join(names)} is being worked on by another process, and how long larger batches may "
            "train depends on it; repeat the command when it is done"
        )
    if not ranks.is_first:
        return None
    findings = write_findings(study, measurements, folder / "report")
    print_table(steps_table(findings.results, base.model.context))
    return findings
