"""`merit scale`: how many steps batches of growing size need to reach a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.scale.rules import Rule, rates_by_batch
from merit_lab.study.command import exit_status, parse, tell
from merit_lab.study.trial import check_distinct
from merit_lab.sweep.grid import parse_shared_learning_rates
from merit_lab.train import MeasureConfig, OptimizerConfig, TrainConfig

_SUMMARY = "Measure how many steps batches of growing size need to reach a loss, and fit the critical batch."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measure how many steps batches of growing size need to reach a loss, and fit the critical batch.

    Each run is a directory in OUT, the page is OUT/report. A call that was stopped is repeated to go on:
    finished runs are not trained again. --steps is the most that any run may take; a larger batch gets no
    more than the next smaller one needed, and a quarter. Unless --optimizer.final says otherwise, the
    learning rate stays at its peak after the warm-up: the steps to the target then depend on how long a run
    was meant to be by the length of its warm-up alone.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    target: float
    """Validation loss to reach, in nats per token."""
    batches: tuple[int, ...]
    """Batch sizes in sequences; powers of two are plenty."""
    lr: tuple[str, ...]
    """Peak learning rates for all optimizers, or as OPTIMIZER=RATE for one; see --rule."""
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order."""
    rule: Rule = "sqrt"
    """sqrt, linear: one rate, grown from --base-batch on; list: one a batch; sweep: the best at each."""
    base_batch: int | None = None
    """The batch that the rate of sqrt and linear is for. None: the smallest."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the first weights and of the order of the data."""
    jobs: int = 1
    """Runs at the same time: on one GPU several of a small model, on a CPU as many as it has cores."""
    out: Path | None = None
    """Folder of the study. None: runs/scale-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as shells have it."""

    def work() -> None:
        arguments, folder = parse_scale(argv)
        from merit_lab.scale.work import scale  # with torch, which help does without

        conclusion = scale(
            arguments.config,
            folder,
            target=arguments.target,
            batches=arguments.batches,
            rates=choose_rates(arguments),
            seeds=arguments.seeds,
            jobs=arguments.jobs,
        )
        tell("merit scale", conclusion)

    return exit_status("merit scale", work)


def parse_scale(argv: Sequence[str]) -> tuple[Arguments, Path]:
    """The arguments, and the folder of the study."""
    arguments, folder = parse(
        Arguments,
        argv,
        command="scale",
        summary=_SUMMARY,
        what="a scaling study",
        lr="--lr merit=9e-3",
        optimizer=OptimizerConfig(final=1.0),
        required=["target", "batches", "lr"],
    )
    for name, value, plain, instead in (
        ("--batch", arguments.config.batch, TrainConfig.batch, "use --batches"),
        ("--tokens", arguments.config.tokens, TrainConfig.tokens, "use --steps, the most a run may take"),
        (
            "--measure.validation-every",
            arguments.config.measure.validation_every,
            MeasureConfig.validation_every,
            "each run is validated fifty times",
        ),
    ):
        if value != plain:
            raise ValueError(f"{name} {value} is for one run; {instead}")
    return arguments, folder


def choose_rates(arguments: Arguments) -> dict[str, dict[int, list[float]]]:
    """Learning rates by optimizer and batch, as the rule has them."""
    check_distinct("batches", arguments.batches)
    smallest = min(arguments.batches)
    base_batch = smallest if arguments.base_batch is None else arguments.base_batch
    for what, size in (("a batch", smallest), ("--base-batch", base_batch)):
        if size < 1:
            raise ValueError(f"{what} is {size}; it must be at least 1")
    given = parse_shared_learning_rates(arguments.optimizers, arguments.lr)
    if missing := [name for name, rates in given.items() if not rates]:
        raise ValueError(f"{missing[0]} has no learning rate; write for example --lr {missing[0]}=1e-3")
    return {
        name: rates_by_batch(arguments.rule, rates, arguments.batches, base_batch, name)
        for name, rates in given.items()
    }
