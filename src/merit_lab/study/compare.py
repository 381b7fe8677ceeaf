"""`merit compare`: several optimizers at given learning rates, with several seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from merit_lab.data import Dataset
from merit_lab.results import statistic
from merit_lab.results.page import Page, Section
from merit_lab.results.series import with_series
from merit_lab.runs import table
from merit_lab.study.answer import losses_table, unfinished
from merit_lab.study.command import StudyArguments, conclude, exit_status, parse, train_all
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import with_values
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
    """Run the command and return its exit status: 128 + n after signal n, as in shells."""

    def work() -> int:
        arguments, folder = parse(Arguments, argv, command="compare", study="a comparison", replaced=REPLACED)
        rates = parse_learning_rates(arguments.lr)
        trials = plan(
            arguments.config, folder, optimizers=arguments.optimizers, seeds=arguments.seeds, rates=rates
        )
        train_all(trials, folder, arguments)
        return conclude("merit compare", lambda: answer(trials), folder)

    return exit_status("merit compare", work)


def plan(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    rates: Mapping[str, Sequence[float]],
) -> list[Trial]:
    """A trial for every optimizer, learning rate and seed; by seed, so that one seed is complete soon."""
    check_distinct("optimizers", optimizers)
    check_distinct("seeds", seeds)
    contestants = [Contestant.parse(text) for text in optimizers]
    check_rates(rates, contestants)
    vocab_size = Dataset.open(base.data).vocab_size
    planned = []
    for seed in seeds:
        for one in contestants:
            optimizer = one.over(base.optimizer)
            given = {f"optimizer.{name}": value for name, value in one.given}
            for lr in rates.get(one.text, rates.get(one.name, [given.get("optimizer.lr")])):
                start = dataclasses.replace(base, optimizer=optimizer, seed=seed)
                config = with_values(start, {**given, "optimizer.lr": lr}).resolve(vocab_size)
                name = f"{one.slug}-lr{config.optimizer.lr:g}-seed{seed}"
                planned.append(Trial(folder / name, config))
    return planned


def answer(trials: Sequence[Trial]) -> Page:
    """Which of the trials' series ends lowest, and by how much."""
    return compared(table.read(*(trial.folder for trial in trials)), "Comparison")


def compared(records: table.Table, title: str) -> Page:
    """The series of some runs side by side: losses, differences of all pairs, and curves."""
    from merit_lab.results import charts  # altair takes a second to import

    runs = with_series(records.runs)
    differences = statistic.differences(runs)
    losses = losses_table(runs)
    best = losses.rows[0][0] if losses.rows else ""
    rows = differences.filter((pl.col("first") == best) | (pl.col("second") == best))["words"].to_list()
    sections = [Section("Final losses", losses, "Mean over seeds, in nats per token, the lowest first.")]
    if not differences.is_empty():
        caption = "Paired over seeds. All intervals hold at once with 95% confidence."
        sections.append(Section("Differences", differences.select("words"), caption))
    if runs["validation_loss"].is_finite().any():
        drawn = [
            charts.curves(runs, records.steps, against=one, name=f"loss-{one}", title=f"Loss against {one}")
            for one in ("step", "tokens", "seconds")
        ]
        caption = "Thin lines are seeds, thick ones their means; a cross is where a run diverged."
        sections.append(Section("Curves", drawn, caption))
    return Page(
        title=title,
        facts=[*runs["conditions"].unique(maintain_order=True), f"{runs.height} runs"],
        summary="; ".join(rows) + "." if rows else f"{best} is the only one." if best else "No run finished.",
        warnings=unfinished(runs),
        sections=sections,
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
    """Raise if a rate is not above 0, is there twice, or is for an optimizer that is not there."""
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
