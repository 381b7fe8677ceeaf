"""`merit compare`: several optimizers at given learning rates, with several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.results.page import Page
from merit_lab.results.series import with_series
from merit_lab.runs import table
from merit_lab.runs.settings import show
from merit_lab.study.answer import rank, unfinished
from merit_lab.study.command import StudyArguments, run_study, train_all
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import LR, short, value_of, with_values
from merit_lab.study.trial import Trial, check_distinct
from merit_lab.train import TrainConfig

REPLACED = {
    "--seed": "--seeds 0 1 2",
    "--optimizer.name": "--optimizers lamb merit",
    "--optimizer.lr": "--lr merit=9e-3",
}


@dataclass(frozen=True, kw_only=True)
class Arguments(StudyArguments):
    """Train one model with several optimizers and seeds, and compare them.

    Each run is a directory OUT/OPTIMIZER-lrRATE-seedSEED, the page is OUT/report. To continue after an
    interruption, run the same command again: finished runs are not repeated.
    """

    optimizers: tuple[str, ...] = ("adamw", "lamb", "merit")
    """The optimizers, in order, as NAME or NAME,OPTION=VALUE,..."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the initial weights and of the data order."""
    lr: tuple[str, ...] = ()
    """Peak learning rates as OPTIMIZER=RATE, one or more per optimizer. Default: the paper's."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""

    def work(arguments: Arguments, folder: Path) -> Callable[[], Page]:
        trials = plan(
            arguments.config,
            folder,
            optimizers=arguments.optimizers,
            seeds=arguments.seeds,
            rates=parse_learning_rates(arguments.lr),
        )
        train_all(trials, folder, arguments)
        return lambda: answer(trials)

    return run_study("compare", Arguments, argv, work, replaced=REPLACED)


def plan(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    rates: Mapping[str, Sequence[float]],
    usual: Callable[[TrainConfig], Sequence[float | None]] = lambda config: [config.optimizer.lr],
    grid: Sequence[Mapping[str, object]] = ({},),
) -> list[Trial]:
    """A trial for every seed, optimizer, point of a grid and learning rate; one seed is complete soon.

    Args:
        base: the configuration that all share.
        folder: the folder of the runs.
        optimizers: contestants as text.
        seeds: the seeds.
        rates: learning rates by contestant or by optimizer.
        usual: the rates of a configuration for which ``rates`` has none; None is the paper's.
        grid: values of other fields, by dotted name.
    """
    check_distinct("seeds", seeds)
    check_distinct("optimizers", optimizers)
    contestants = [Contestant.parse(text) for text in optimizers]
    check_rates(rates, contestants)
    vocab_size = Dataset.open(base.data).vocab_size
    trials = []
    for seed in seeds:
        for one in contestants:
            start = dataclasses.replace(base, optimizer=one.over(base.optimizer), seed=seed)
            for values in grid:
                for lr in rates.get(one.text, rates.get(one.name)) or usual(start):
                    config = with_values(start, {LR: lr, **values}).resolve(vocab_size)
                    for field, value in values.items():
                        if value_of(config, field) != value:
                            kept = show(value_of(config, field))
                            raise ValueError(
                                f"--set {field} {show(value)}: the run would have {kept}; give numbers, "
                                "lengths as --set steps, and --no-fit-vocab with a vocabulary"
                            )
                    set_to = [f"{short(field)}={show(value)}" for field, value in values.items()]
                    name = "-".join([one.slug, f"lr{config.optimizer.lr:g}", *set_to, f"seed{seed}"])
                    name = name.replace(", ", ",").replace("/", "_")
                    trials.append(Trial(folder / name, config))
    return trials


def answer(trials: Sequence[Trial]) -> Page:
    """Which of the trials' series ends lowest, and by how much."""
    runs, steps = table.read(*(trial.folder for trial in trials))
    runs = with_series(runs)
    ranking = rank(runs, steps)
    return Page(
        title="Comparison",
        facts=[*runs["conditions"].unique(maintain_order=True), f"{runs.height} runs"],
        summary=ranking.summary,
        warnings=[*ranking.warnings, *unfinished(runs)],
        sections=ranking.sections,
        runs=runs,
    )


def parse_learning_rates(texts: Iterable[str], everyone: Sequence[str] = ()) -> dict[str, list[float]]:
    """Parse learning rates by optimizer from texts like "merit=9e-3".

    With ``everyone`` a text like "9e-3" is a rate of all these optimizers, and comes before their own.

    Example:
        >>> parse_learning_rates(["adamw=1e-3", "merit=9e-3", "merit=2e-2"])
        {'adamw': [0.001], 'merit': [0.009, 0.02]}
    """
    form = "RATE, as in 9e-3, or OPTIMIZER=RATE" if everyone else "OPTIMIZER=RATE"
    rates: dict[str, list[float]] = {}
    for text in sorted(texts, key=lambda text: "=" in text):
        name, equals, rate = text.rpartition("=")
        try:
            optimizers = [name] if equals else everyone
            if not any(optimizers):
                raise ValueError
            for optimizer in optimizers:
                rates.setdefault(optimizer, []).append(float(rate))
        except ValueError:
            raise ValueError(
                f"cannot parse the learning rate {text!r}; write {form}, as in merit=9e-3"
            ) from None
    return rates


def check_rates(rates: Mapping[str, Sequence[float]], contestants: Sequence[Contestant]) -> None:
    """Raise ValueError if a rate is not above 0, is there twice, or is for an optimizer that is not there."""
    known = {name for one in contestants for name in (one.name, one.text)}
    for name, values in rates.items():
        if name not in known:
            raise ValueError(
                f"a learning rate is given for {name}, which is not one of "
                f"{', '.join(one.text for one in contestants)}"
            )
        check_distinct(f"learning rates of {name}", values)
        if not all(0 < value < float("inf") for value in values):
            raise ValueError(f"a learning rate of {name} is {min(values):g}; it must be a number above 0")
