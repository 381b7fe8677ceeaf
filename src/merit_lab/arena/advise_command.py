"""`merit advise`: recommend an optimizer and its settings from the results of arenas."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.arena.advice import (
    PRIOR_DEVIATION,
    PRIOR_MEAN,
    Advice,
    StandingRecord,
    advise,
    rank,
    read_boards,
)
from merit_lab.arena.contestant import Contestant, labels
from merit_lab.models import find_model, num_parameters
from merit_lab.report import print_table
from merit_lab.report.summary import join
from merit_lab.report.tables import Table
from merit_lab.study.fields import train_option, with_values
from merit_lab.train import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Recommend an optimizer and its settings for a model and a batch size, from the results of arenas.

    The best learning rate is assumed to follow a power law in the batch and the model size. If all arenas had
    the same batch or size, a prior decides: the square root of the batch, and no change with the size, each
    with an uncertainty.
    """

    arenas: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of `merit arena`, with the same model family and the same text."""
    model: str
    """The model to train, as in `merit train`."""
    batch: int
    """Batch size in sequences."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), prog="merit advise")
    try:
        _, model = find_model(arguments.model)
        if arguments.batch < 1:
            raise ValueError(f"--batch is {arguments.batch}; it must be at least 1")
        standings = read_boards(arguments.arenas)
    except (OSError, ValueError) as error:
        print(f"merit advise: {error}", file=sys.stderr)
        return 1
    parameters = num_parameters(model)
    order = rank(standings, arguments.batch, parameters)
    advice = [advise(standings, optimizer, arguments.batch, parameters) for optimizer in order]
    print_table(_table(advice))
    for line in _explanation(standings, advice, arguments, parameters):
        print(line)
    return 0


def _table(advice: Sequence[Advice]) -> Table:
    contestants = [Contestant.parse(one.optimizer) for one in advice]
    names = labels(contestants)
    rows = [
        (names[contestant], f"{one.lr:.2g}", f"{one.low:.2g} to {one.high:.2g}", str(one.num_boards))
        for contestant, one in zip(contestants, advice, strict=True)
    ]
    return Table(("Optimizer", "Learning rate", "80% interval", "Boards"), tuple(rows))


def _explanation(
    standings: Sequence[StandingRecord], advice: Sequence[Advice], arguments: Arguments, parameters: int
) -> Iterator[str]:
    """Lines that explain the table, and the training command to start with."""
    best = advice[0]
    near = min(standings, key=lambda standing: standing.distance(arguments.batch, parameters))
    sizes = join([f"{size / 1e6:.3g}M" for size in sorted({standing.parameters for standing in standings})])
    batches = join([str(batch) for batch in sorted({standing.batch for standing in standings})])
    yield (
        f"\nThe arenas had {sizes} parameters and batches of {batches}. The order is that of the nearest "
        f"arena, {near.parameters / 1e6:.3g}M with a batch of {near.batch}; it may be different at "
        f"{parameters / 1e6:.3g}M."
    )
    if (
        len({standing.batch for standing in standings}) == 1
        or len({standing.parameters for standing in standings}) == 1
    ):
        yield (
            f"Exponents that they do not determine come from a prior: rates grow as "
            f"batch**({PRIOR_MEAN[0]:g} ± {PRIOR_DEVIATION[0]:g}) and as "
            f"size**({PRIOR_MEAN[1]:g} ± {PRIOR_DEVIATION[1]:g})."
        )
    yield "\nStart with:"
    options = shlex.join(_train_options(best))
    yield f"  merit train {arguments.model} --data FOLDER --batch {arguments.batch} {options}"


def _train_options(best: Advice) -> Iterator[str]:
    """The options of `merit train` for an optimizer."""
    chosen, default = with_values(best.config, best.settings).optimizer, OptimizerConfig()
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name == "name" or value != getattr(default, field.name):
            option, *values = train_option(f"optimizer.{field.name}", value)
            yield from (option.replace("_", "-"), *values)
