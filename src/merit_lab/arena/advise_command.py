"""`merit advise`: recommend an optimizer and its settings from the results of arenas."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from merit_lab.arena.advice import (
    PRIOR_DEVIATION,
    PRIOR_WITH_RATIOS,
    PRIOR_WITHOUT,
    Advice,
    RunSize,
    StandingRecord,
    advise,
    determines_exponents,
    rank,
    read_boards,
)
from merit_lab.arena.contestant import Contestant, labels
from merit_lab.checks import check_at_least
from merit_lab.command_line import rules
from merit_lab.models import find_model, num_parameters
from merit_lab.study.fields import train_option, with_values
from merit_lab.tables import Table, print_table
from merit_lab.text import amount, join
from merit_lab.train import OptimizerConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Recommend an optimizer and its settings for a run, from the results of arenas.

    The best learning rate is assumed to follow a power law in the batch, the model size and the steps. Where
    the arenas do not determine an exponent, a prior does, with an uncertainty: rates grow a little with the
    batch and fall a little with the size. With trust ratios, as MERIT and MuonMERIT have, they fall as the
    square root of the steps.
    """

    arenas: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of `merit arena`, with the same model family and the same text."""
    model: str
    """The model to train, as in `merit train`."""
    batch: int
    """Batch size in sequences."""
    steps: int | None = None
    """Length of the run in steps. None: 20 tokens per parameter, as in `merit train`."""

    def size(self) -> RunSize:
        """The size of the run."""
        for name, number in (("batch", self.batch), ("steps", self.steps)):
            if number is not None:
                check_at_least(f"--{name}", number, 1)
        _, model = find_model(self.model)
        config = TrainConfig(data=Path(), model=model, batch=self.batch, steps=self.steps).resolve(None)
        assert config.steps is not None
        return RunSize(self.batch, num_parameters(model), config.steps)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    arguments = tyro.cli(Arguments, args=list(argv), prog="merit advise", registry=rules())
    try:
        size = arguments.size()
        standings = read_boards(arguments.arenas)
    except (OSError, ValueError) as error:
        print(f"merit advise: {error}", file=sys.stderr)
        return 1
    advice = [advise(standings, optimizer, size) for optimizer in rank(standings, size)]
    print_table(_table(advice))
    for line in _explanation(standings, advice, arguments.model, size):
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
    standings: Sequence[StandingRecord], advice: Sequence[Advice], model: str, size: RunSize
) -> Iterator[str]:
    """Lines that explain the table, and the training command to start with."""
    sizes = sorted({standing.size for standing in standings})
    nearest = min(sizes, key=size.distance)
    yield (
        f"\nThe arenas had {_each((one.parameters for one in sizes), amount)} parameters, batches of "
        f"{_each(one.batch for one in sizes)} and {_each(one.steps for one in sizes)} steps. "
        f"The order is that of the nearest, {_described(nearest)}; for {_described(size)} it may be another."
    )
    sizes_of: dict[str, set[RunSize]] = {}
    for standing in standings:
        sizes_of.setdefault(standing.optimizer, set()).add(standing.size)
    if not all(determines_exponents(sorted(own)) for own in sizes_of.values()):
        common, steps = PRIOR_WITHOUT, (PRIOR_WITH_RATIOS.steps, PRIOR_WITHOUT.steps)
        yield (
            f"Exponents that they do not determine come from a prior: rates go as batch**{common.batch:g}, "
            f"size**{common.parameters:g}, and steps**{steps[0]:g} with trust ratios or steps**{steps[1]:g} "
            f"without, each ± {PRIOR_DEVIATION:g}."
        )
    yield (
        "Learning rates alone are carried over, a rest_lr as the same share of the other rate. Everything "
        "else is as in the nearest arena. For another size it may not be the best: tune rest_lr first."
    )
    yield "\nStart with:"
    options = shlex.join(_train_options(advice[0]))
    yield f"  merit train {model} --data FOLDER --batch {size.batch} --steps {size.steps} {options}"


def _each(numbers: Iterable[int], show: Callable[[int], str] = "{:,}".format) -> str:
    return join([show(number) for number in sorted(set(numbers))])


def _described(size: RunSize) -> str:
    return f"{amount(size.parameters)} parameters and {size.steps:,} steps of {size.batch:,} sequences"


def _train_options(best: Advice) -> Iterator[str]:
    """The options of `merit train` for an optimizer."""
    chosen, default = with_values(best.config, best.settings).optimizer, OptimizerConfig()
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        if field.name == "name" or value != getattr(default, field.name):
            option, *values = train_option(f"optimizer.{field.name}", value)
            yield from (option.replace("_", "-"), *values)
