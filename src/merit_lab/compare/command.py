"""`merit compare`: train with several optimizers and seeds, and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.compare.plan import parse_learning_rates
from merit_lab.study.command import exit_status, parse, print_conclusion
from merit_lab.train import TrainConfig

_SUMMARY = "Train one model with several optimizers and seeds, and report."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train one model with several optimizers and seeds, and report.

    Each run is a directory OUT/OPTIMIZER-lrRATE-seedSEED, the report is OUT/report. To continue after
    an interruption, run the same command again: finished runs are not repeated.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""
    lr: tuple[str, ...] = ()
    """Peak learning rates as OPTIMIZER=RATE, one or more per optimizer. Default: the paper's."""
    jobs: int = 1
    """Runs at the same time: several of a small model on one GPU, up to the number of cores on a CPU."""
    out: Path | None = None
    """Folder of the comparison. None: runs/compare-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> None:
        arguments, folder = parse(
            Arguments, argv, command="compare", summary=_SUMMARY, study="a comparison", lr="--lr merit=9e-3"
        )
        from merit_lab.compare.work import compare  # imports torch, which --help does not need

        conclusion = compare(
            arguments.config,
            folder,
            optimizers=arguments.optimizers,
            seeds=arguments.seeds,
            learning_rates=parse_learning_rates(arguments.lr),
            jobs=arguments.jobs,
        )
        print_conclusion("merit compare", conclusion)

    return exit_status("merit compare", work)
