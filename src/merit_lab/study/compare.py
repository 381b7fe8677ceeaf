"""`merit compare`: several optimizers at given learning rates, with several seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.results.page import Page
from merit_lab.results.series import with_series
from merit_lab.runs import table
from merit_lab.runs.settings import show
from merit_lab.study.answer import ranking
from merit_lab.study.command import StudyArguments, run_study, train_all
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import LR, short, value_of, with_values
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.train import TrainConfig

REPLACED = {
    "--seed": "--seeds 0 1 2",
    "--optimizer.name": "--optimizers lamb-uncorrected merit",
    "--optimizer.lr": "--lr merit=9e-3",
}


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Train one model with several optimizers and seeds, and compare them.

    Each run is a directory OUT/OPTIMIZER-lrRATE-seedSEED, the page is OUT/report. To continue after an
    interruption, run the same command again: finished runs are not repeated.
    """

    lr: tuple[str, ...] = ()
    """Peak learning rates: RATE for all, OPTIMIZER=RATE for one. Default: the paper's."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def work(arguments: Arguments, folder: Path) -> Callable[[], Page]:
        train_all(plan(arguments, folder), folder, arguments)
        return lambda: answer(folder)

    return run_study("compare", Arguments, argv, work, replaced=REPLACED)


def plan(
    arguments: Arguments,
    folder: Path,
    usual: Callable[[TrainConfig], Sequence[float | None]] = lambda config: [config.optimizer.lr],
    grid: Sequence[Mapping[str, object]] = ({},),
) -> list[Trial]:
    """A trial for every seed, optimizer, point of a grid and learning rate; one seed is complete soon.

    Args:
        arguments: what all share, the optimizers with their rates, and the seeds.
        folder: the folder of the runs.
        usual: the rates of a configuration for which none is given; None is the paper's.
        grid: values of other fields, by dotted name.
    """
    check_distinct("seeds", arguments.seeds)
    check_distinct("optimizers", arguments.optimizers)
    contestants = [Contestant.parse(text) for text in arguments.optimizers]
    rates = rates_of(arguments.lr, contestants)
    base = arguments.config
    vocab_size = Dataset.open(base.data).vocab_size
    trials = []
    for seed, one in itertools.product(arguments.seeds, contestants):
        start = dataclasses.replace(base, optimizer=one.over(base.optimizer), seed=seed)
        for values, lr in itertools.product(grid, rates[one.text] or usual(start)):
            config = with_values(start, {LR: lr, **values}).resolve(vocab_size)
            for field, value in values.items():
                if (kept := value_of(config, field)) != value:
                    raise ValueError(
                        f"--set {field} {show(value)}: the run would have {show(kept)}; give numbers, "
                        "lengths as --set steps, and --no-fit-vocab with a vocabulary"
                    )
            set_to = [f"{short(field)}={show(value)}" for field, value in values.items()]
            name = "-".join([one.slug, f"lr{config.optimizer.lr:g}", *set_to, f"seed{seed}"])
            trials.append(Trial(folder / name.replace(", ", ",").replace("/", "_"), config))
    return trials


def answer(folder: Path) -> Page:
    """Which series ends lowest among all runs in a folder, and by how much."""
    runs, steps = table.read(folder)
    runs = with_series(runs)
    sections, summary = ranking(runs, steps)
    conditions = runs["conditions"].unique(maintain_order=True)
    facts = [*conditions, f"{runs.height} runs"]
    return Page("Comparison", facts=facts, summary=summary, sections=sections, runs=runs)


def rates_of(texts: Iterable[str], contestants: Sequence[Contestant]) -> dict[str, list[float]]:
    """The learning rates that are given for each contestant, by its text: RATE for all, or OPTIMIZER=RATE.

    Example:
        >>> rates_of(["merit=9e-3", "1e-3"], [Contestant("adamw"), Contestant("merit")])
        {'adamw': [0.001], 'merit': [0.001, 0.009]}
    """
    given: dict[str, list[float]] = {}
    for text in texts:
        name, _, rate = text.rpartition("=")
        try:
            value = float(rate)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(
                f"cannot parse the learning rate {text!r}; write RATE or OPTIMIZER=RATE, a number above 0, "
                "as in merit=9e-3"
            )
        given.setdefault(name, []).append(value)
    for name in given:
        if name and not any(name in (one.name, one.text) for one in contestants):
            known = ", ".join(one.text for one in contestants)
            raise ValueError(f"a learning rate is given for {name}, which is not one of {known}")
    rates = {
        one.text: [*given.get("", []), *given.get(one.text, given.get(one.name, []))] for one in contestants
    }
    for name, values in rates.items():
        check_distinct(f"learning rates of {name}", values or [None])
    return rates
