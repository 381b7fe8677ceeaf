"""`merit sweep`: find the best learning rate, or another setting, of each optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.study.command import exit_status, parse, print_conclusion
from merit_lab.study.fields import find_field, parse_value
from merit_lab.sweep.grid import SweepGrid, choose_learning_rates
from merit_lab.train import TrainConfig

_SUMMARY = "Train one model at many learning rates or other settings, and show which are best."


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Train one model at many learning rates or other settings, and show which are best.

    Each run is a directory OUT/OPTIMIZER-lrRATE-seedSEED, the page is OUT/report. To continue after an
    interruption, run the same command again: finished runs are not repeated. All runs in OUT belong to the
    sweep, including those of earlier calls.
    """

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order."""
    lr: tuple[str, ...] = ()
    """Peak learning rates: RATE for all, OPTIMIZER=RATE for one. Default: five around the paper's."""
    fields: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.arg(name="set", metavar="FIELD VALUE ..."),
        tyro.conf.UseAppendAction,
    ] = ()
    """Another field of the configuration and its values, as in: optimizer.weight-decay 0 0.1."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""
    extend: bool = False
    """Extend the grid by its factor where a best rate lies at its edge, by at most six rates."""
    jobs: int = 1
    """Runs at the same time: several of a small model on one GPU, up to the number of cores on a CPU."""
    out: Path | None = None
    """Folder of the sweep. None: runs/sweep-MODEL."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> None:
        arguments, folder = parse(
            Arguments, argv, command="sweep", summary=_SUMMARY, study="a sweep", lr="--lr 1e-3 2e-3 4e-3"
        )
        from merit_lab.study import run_study
        from merit_lab.sweep.study import Sweep  # imports torch, which --help does not need

        grid = SweepGrid(
            base=arguments.config,
            folder=folder,
            learning_rates=choose_learning_rates(arguments.config, arguments.optimizers, arguments.lr),
            fields=parse_fields(arguments.fields),
            seeds=arguments.seeds,
        )
        conclusion = run_study(Sweep(grid, extend=arguments.extend), arguments.jobs)
        print_conclusion("merit sweep", conclusion, f"The best settings: {folder / 'report' / 'best.json'}")

    return exit_status("merit sweep", work)


def parse_fields(texts: Iterable[Sequence[str]]) -> dict[str, list[object]]:
    """Parse the fields and values of `--set`.

    Example:
        >>> parse_fields([("optimizer.weight-decay", "0", "0.1")])
        {'optimizer.weight_decay': [0.0, 0.1]}
    """
    fields: dict[str, list[object]] = {}
    for name, *values in texts:
        field = find_field(name)
        if not values or field in fields:
            raise ValueError(
                f"--set {name} {'has no values' if not values else 'is given twice'}; write for example "
                f"--set {name} VALUE VALUE"
            )
        fields[field] = [parse_value(field, value) for value in values]
    return fields
