"""A scaling study from its plan to its findings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from merit_lab.compare import carry_out
from merit_lab.record import RunInUse
from merit_lab.report import print_table
from merit_lab.scale.measure import Measurement, choose, measure
from merit_lab.scale.plan import Rates, Study
from merit_lab.scale.words import steps_table
from merit_lab.scale.write import Findings, write_findings
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
    """
    import scipy  # type: ignore[import-untyped] # noqa: F401  # missed now, not after hours of training

    ranks = Ranks.join()
    study = Study(base=base, folder=folder, target=target, batches=sorted(batches), rates=rates, seeds=seeds)
    console = Console(stderr=True, highlight=False, quiet=not ranks.is_first)
    folders: list[Path] = []
    measurements: list[Measurement] = []
    for batch in study.batches:
        smaller = {own.optimizer: own for own in choose(measurements)}  # the last one is the largest batch
        planned = ranks.first(partial(study.plan, batch, smaller))
        console.print(f"Batches of {batch} sequences", style="bold", markup=False)
        carry_out(planned, ranks)
        folders += [run.folder for run in planned]
        measurements = ranks.first(partial(measure, folders, target))
        unfinished = [own.name for one in measurements for own in one.attempts if not own.is_done]
        if unfinished:
            raise RunInUse(
                f"{', '.join(unfinished)} is being worked on by another process, and how long larger batches "
                "may train depends on it; repeat the command when it is done"
            )
    if not ranks.is_first:
        return None
    findings = write_findings(study, measurements, folder / "report")
    print_table(steps_table(findings.results, base.model.context))
    return findings
