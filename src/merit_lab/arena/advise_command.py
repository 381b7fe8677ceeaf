"""`merit advise`: what the records of arenas say about another model or batch."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.arena.advice import PRIOR_DEVIATION, PRIOR_MEAN, Advice, Known, advise, rank, read_boards
from merit_lab.arena.entry import Entry, labels
from merit_lab.models import find_model, num_parameters
from merit_lab.report import print_table
from merit_lab.report.summary import join
from merit_lab.report.tables import Table
from merit_lab.study.fields import train_option, with_values
from merit_lab.train import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Say which optimizer to take for a model and a batch, and with which settings, by what arenas found.

    The best learning rate is taken to follow a power law in batch and size; what the arenas do not tell of
    it, because all had one batch or one size, is the square root of the batch and no change with the size,
    give or take.
    """

    arenas: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of `merit arena`, of one family of models and one text."""
    model: str
    """The model to be trained, as `merit train` takes it."""
    batch: int
    """Its batch in sequences."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), prog="merit advise")
    try:
        _, model = find_model(arguments.model)
        if arguments.batch < 1:
            raise ValueError(f"--batch is {arguments.batch}; it must be at least 1")
        known = read_boards(arguments.arenas)
    except (OSError, ValueError) as error:
        print(f"merit advise: {error}", file=sys.stderr)
        return 1
    parameters = num_parameters(model)
    order = rank(known, arguments.batch, parameters)
    found = [advise(known, optimizer, arguments.batch, parameters) for optimizer in order]
    print_table(_table(found))
    for line in _words(known, found, arguments, parameters):
        print(line)
    return 0


def _table(found: Sequence[Advice]) -> Table:
    entries = [Entry.parse(own.optimizer) for own in found]
    names = labels(entries)
    rows = [
        (names[entry], f"{own.lr:.2g}", f"{own.low:.2g} to {own.high:.2g}", str(own.num_boards))
        for entry, own in zip(entries, found, strict=True)
    ]
    return Table(("Optimizer", "Learning rate", "Four times of five", "Boards"), tuple(rows))


def _words(
    known: Sequence[Known], found: Sequence[Advice], arguments: Arguments, parameters: int
) -> Iterator[str]:
    """How it was reached, and what to type."""
    best = found[0]
    near = min(known, key=lambda own: own.distance(arguments.batch, parameters))
    sizes = join([f"{size / 1e6:.3g}M" for size in sorted({own.parameters for own in known})])
    batches = join([str(batch) for batch in sorted({own.batch for own in known})])
    yield (
        f"\nThe arenas had {sizes} parameters and batches of {batches}. The order is that of the nearest, "
        f"{near.parameters / 1e6:.3g}M with a batch of {near.batch}; nothing says that it is the same at "
        f"{parameters / 1e6:.3g}M."
    )
    if len({own.batch for own in known}) == 1 or len({own.parameters for own in known}) == 1:
        yield (
            f"What they cannot tell is taken from before: rates grow as batch**{PRIOR_MEAN[0]:g} (give or "
            f"take {PRIOR_DEVIATION[0]:g}) and as size**{PRIOR_MEAN[1]:g} (give or take "
            f"{PRIOR_DEVIATION[1]:g})."
        )
    yield "\nTo begin with:"
    options = shlex.join(_train_options(best))
    yield f"  merit train {arguments.model} --data FOLDER --batch {arguments.batch} {options}"


def _train_options(best: Advice) -> Iterator[str]:
    """What `merit train` must be told of an optimizer."""
    chosen, plain = with_values(best.config, best.settings).optimizer, OptimizerConfig()
    for own in dataclasses.fields(chosen):
        value = getattr(chosen, own.name)
        if own.name == "name" or value != getattr(plain, own.name):
            option, *values = train_option(f"optimizer.{own.name}", value)
            yield from (option.replace("_", "-"), *values)
