"""A comparison from its plan to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.compare.plan import plan
from merit_lab.report import Report, find_runs, print_outcomes, write_report
from merit_lab.study import Round, Trial, conduct
from merit_lab.train import TrainConfig
from merit_lab.train.parallel import Ranks


@dataclass(frozen=True)
class Comparison:
    """All its trials are known from the beginning."""

    folder: Path
    trials: Sequence[Trial]

    def next(self) -> Round:
        return Round(self.trials)


def compare(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Mapping[str, Sequence[float]],
    jobs: int = 1,
) -> Report | None:
    """Train with every optimizer and seed, print the table, and write the report into ``folder``/report.

    So many runs are trained at the same time. Under torchrun only the first rank reports; the others return
    None.
    """
    ranks = Ranks.join()
    trials = plan(base, folder, optimizers=optimizers, seeds=seeds, learning_rates=learning_rates)
    conduct(Comparison(folder, trials), ranks, jobs)
    if not ranks.is_first:
        return None
    report = write_report(find_runs([own.folder for own in trials]), folder / "report")
    print_outcomes(report.outcomes)
    return report
