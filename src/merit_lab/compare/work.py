"""Carry out a comparison, from its plan to its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.compare.plan import plan
from merit_lab.results import Report, find_runs
from merit_lab.study import Conclusion, Round, Trial, run_study
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class CompareStudy:
    """A comparison as a study, in a single round."""

    folder: Path
    trials: Sequence[Trial]

    def next(self) -> Round:
        return Round(self.trials)

    def findings(self) -> Report:
        return Report.of(find_runs([trial.folder for trial in self.trials]))


def compare(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Mapping[str, Sequence[float]],
    jobs: int = 1,
) -> Conclusion | None:
    """Train with every optimizer and seed, print the table, and write the report into ``folder``/report."""
    trials = plan(base, folder, optimizers=optimizers, seeds=seeds, learning_rates=learning_rates)
    return run_study(CompareStudy(folder, trials), jobs)
