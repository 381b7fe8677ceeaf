"""`merit arena`: which optimizer is best, if all are tuned alike."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.arena.plan import Arena
from merit_lab.arena.work import contest
from merit_lab.compare.plan import parse_learning_rates
from merit_lab.study.command import exit_status, parse, tell
from merit_lab.train import TrainConfig
from merit_optim.optim.registry import OPTIMIZERS

_SUMMARY = "Tune several optimizers with the same budget each, and show which is best."

# Where searches begin for want of a rate in the paper: near the best at 10M parameters (docs/results.md).
_BEGIN = {"muon": 1.6e-2, "normuon": 1.6e-2, "orscale": 1.6e-2, "soap": 4e-3, "maxlamb": 1e-2}


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
    """The contestants."""
    budget: int = 6
    """Tuning runs of each contestant and batch size, at least 3."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds at the best setting; tuning is with the first."""
    batches: tuple[int, ...] = ()
    """Batch sizes in sequences, with as many tokens each. None given: --batch."""
    lr: tuple[str, ...] = ()
    """Where the search of a learning rate begins, as OPTIMIZER=RATE. Else the paper's, or its default."""
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
        config = arguments.config
        arena = Arena(
            base=config,
            folder=folder,
            optimizers=arguments.optimizers,
            rates=begin_at(config, arguments.optimizers, arguments.lr),
            batches=sorted(arguments.batches) or [config.batch],
            budget=arguments.budget,
            seeds=arguments.seeds,
        )
        tell("merit arena", contest(arena, arguments.jobs))

    return exit_status("merit arena", work)


def begin_at(config: TrainConfig, optimizers: Sequence[str], texts: Sequence[str]) -> Mapping[str, float]:
    """The learning rate at which each search begins."""
    given = parse_learning_rates(texts)
    for name, rates in given.items():
        if name not in optimizers or len(rates) > 1:
            raise ValueError(
                f"--lr has {len(rates)} for {name}; a search begins at one rate, of a contestant: "
                f"{', '.join(optimizers)}"
            )
    return {name: given[name][0] if name in given else _own_rate(config, name) for name in optimizers}


def _own_rate(config: TrainConfig, optimizer: str) -> float:
    if optimizer in _BEGIN:
        return _BEGIN[optimizer]
    preset = OPTIMIZERS.get(optimizer)
    if preset is not None and not preset.learning_rates:
        return float(inspect.signature(preset.optimizer).parameters["lr"].default)
    resolved = type(config.optimizer)(name=optimizer).resolve(config.model)
    assert resolved.lr is not None
    return resolved.lr
