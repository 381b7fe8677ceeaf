"""`merit scale`: the steps that growing batch sizes need to reach a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.checks import check_at_least
from merit_lab.scale.rules import RateRule, rates_by_batch
from merit_lab.study.command import exit_status, parse, print_conclusion
from merit_lab.study.trial import check_distinct
from merit_lab.sweep.grid import parse_shared_learning_rates
from merit_lab.train import OptimizerConfig, TrainConfig

_SUMMARY = "Measure the steps that growing batch sizes need to reach a loss, and fit the critical batch."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure the steps that growing batch sizes need to reach a loss, and fit the critical batch.

    Each run is a directory in OUT, the page is OUT/report. To continue after an interruption, run the same
    command again: finished runs are not repeated. A run ends at the target. --steps is its limit; a larger
    batch gets at most 1.25 times the steps that the next smaller one needed. Unless --optimizer.final is
    set, the learning rate stays at its peak after the warm-up: then the planned length of a run affects the
    steps to the target only through the length of its warm-up.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    batches: tuple[int, ...]
    """Batch sizes in sequences; powers of two are enough."""
    lr: tuple[str, ...]
    """Peak learning rates: RATE for all optimizers, OPTIMIZER=RATE for one; see --rule."""
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order."""
    rule: RateRule = "sqrt"
    """sqrt, linear: scale one rate from --base-batch; list: one rate per batch; sweep: the best per batch."""
    base_batch: int | None = None
    """The batch to which the rate of sqrt and linear applies. None: the smallest."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""
    jobs: int = 1
    """Runs at the same time: several of a small model on one GPU, up to the number of cores on a CPU."""
    out: Path | None = None
    """Folder of the study. None: runs/scale-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> None:
        arguments, folder = parse_scale(argv)
        if (target := arguments.config.target) is None:
            raise ValueError("there is no loss to reach; give it with --target, in nats per token")
        from merit_lab.scale.plan import Scaling  # imports torch, which --help does not need
        from merit_lab.study import run_study

        scaling = Scaling(
            base=arguments.config,
            folder=folder,
            target=target,
            batches=sorted(arguments.batches),
            rates=choose_rates(arguments),
            seeds=arguments.seeds,
        )
        print_conclusion("merit scale", run_study(scaling, arguments.jobs))

    return exit_status("merit scale", work)


def parse_scale(argv: Sequence[str]) -> tuple[Arguments, Path]:
    """Parse the arguments, and return them with the folder of the study."""
    return parse(
        Arguments,
        argv,
        command="scale",
        summary=_SUMMARY,
        study="a scaling study",
        lr="--lr merit=9e-3",
        optimizer=OptimizerConfig(final=1.0),
        required=["batches", "lr"],
        replaced={
            "--batch": "use --batches",
            "--tokens": "use --steps, the limit of every run",
            "--measure.validation-every": "each run is validated fifty times",
        },
    )


def choose_rates(arguments: Arguments) -> dict[str, dict[int, list[float]]]:
    """Learning rates by optimizer and batch, by the chosen rule."""
    check_distinct("batches", arguments.batches)
    smallest = min(arguments.batches)
    base_batch = smallest if arguments.base_batch is None else arguments.base_batch
    for option, size in (("a batch", smallest), ("--base-batch", base_batch)):
        check_at_least(option, size, 1)
    by_optimizer = parse_shared_learning_rates(arguments.optimizers, arguments.lr)
    if missing := [name for name, rates in by_optimizer.items() if not rates]:
        raise ValueError(f"{missing[0]} has no learning rate; write for example --lr {missing[0]}=1e-3")
    return {
        name: rates_by_batch(arguments.rule, rates, arguments.batches, base_batch, name)
        for name, rates in by_optimizer.items()
    }
