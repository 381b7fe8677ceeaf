"""`merit arena`: tune several optimizers with the same budget, and rank them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.study.command import exit_status, parse, print_conclusion
from merit_lab.train import TrainConfig

_SUMMARY = "Tune several optimizers with the same budget each, and show which is best."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tune several optimizers with the same budget each, and show which is best.

    Every contestant has BUDGET tuning runs: first for the learning rate, until the best value has a worse
    neighbour on both sides, then for the learning rate of embeddings and vectors if it is separate, the
    warm-up, the momentum if the optimizer has one and none is given, and the weight decay. Then its best
    settings are trained with every seed. Each run is a directory in OUT, the page is OUT/report. To continue
    after an interruption, run the same command again: finished runs are not repeated.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit", "muon", "muon-merit")
    """The contestants, as NAME or NAME,OPTION=VALUE,... with rest=NAME for a second optimizer."""
    budget: int = 6
    """Tuning runs of each contestant at each batch size, at least 3."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds for the best settings; tuning uses the first."""
    batches: tuple[int, ...] = ()
    """Batch sizes in sequences, all with the same number of tokens. Default: --batch.

    --steps and --lr are those of --batch if it is one of them, else of the smallest.
    """
    lr: tuple[str, ...] = ()
    """Starts of the learning rate searches, as NAME=RATE. Default: the paper's, or the optimizer's."""
    jobs: int = 1
    """Runs at the same time: several of a small model on one GPU, up to the number of cores on a CPU."""
    out: Path | None = None
    """Folder of the arena. None: runs/arena-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> None:
        arguments, folder = parse(
            Arguments, argv, command="arena", summary=_SUMMARY, study="an arena", lr="--lr merit=9e-3"
        )
        from merit_lab.arena.contestant import Contestant, with_rates
        from merit_lab.arena.plan import Arena  # imports torch, which --help does not need
        from merit_lab.study import run_study

        config, batches = arguments.config, sorted(arguments.batches)
        if batches and config.batch not in batches:
            config = replace(config, batch=batches[0])
        arena = Arena(
            base=config,
            folder=folder,
            contestants=with_rates([Contestant.parse(text) for text in arguments.optimizers], arguments.lr),
            batches=batches or [config.batch],
            budget=arguments.budget,
            seeds=arguments.seeds,
        )
        print_conclusion("merit arena", run_study(arena, arguments.jobs))

    return exit_status("merit arena", work)
