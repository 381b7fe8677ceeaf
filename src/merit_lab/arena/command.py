"""`merit arena`: which optimizer is best, if all are tuned alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.study.command import exit_status, parse, print_conclusion
from merit_lab.train import TrainConfig

_SUMMARY = "Tune several optimizers with the same budget each, and show which is best."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tune several optimizers with the same budget each, and show which is best.

    Every contestant has BUDGET tuning runs: the learning rate first, until its best lies inside, then the
    rate of embeddings and vectors where there is one, the warm-up and the weight decay. Then its best setting
    is trained with every seed. Each run is a directory in OUT, the page is OUT/report. A call that was
    stopped is repeated to go on: finished runs are not trained again.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit", "muon", "muon-merit")
    """The contestants, as NAME or NAME,OPTION=VALUE,... with rest=NAME for a second optimizer."""
    budget: int = 6
    """Tuning runs of each contestant and batch size, at least 3."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds at the best setting; tuning is with the first."""
    batches: tuple[int, ...] = ()
    """Batch sizes in sequences, with as many tokens each. None given: --batch."""
    lr: tuple[str, ...] = ()
    """Where the search of a learning rate begins, as NAME=RATE. Else the paper's, or its default."""
    jobs: int = 1
    """Runs at the same time: on one GPU several of a small model, on a CPU as many as it has cores."""
    out: Path | None = None
    """Folder of the arena. None: runs/arena-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells have it."""

    def work() -> None:
        arguments, folder = parse(
            Arguments, argv, command="arena", summary=_SUMMARY, what="an arena", lr="--lr merit=9e-3"
        )
        from merit_lab.arena.entry import Entry, with_rates
        from merit_lab.arena.plan import Arena
        from merit_lab.arena.work import contest  # with torch, which help does without

        config = arguments.config
        arena = Arena(
            base=config,
            folder=folder,
            entries=with_rates([Entry.parse(text) for text in arguments.optimizers], arguments.lr),
            batches=sorted(arguments.batches) or [config.batch],
            budget=arguments.budget,
            seeds=arguments.seeds,
        )
        print_conclusion("merit arena", contest(arena, arguments.jobs))

    return exit_status("merit arena", work)
