"""Which runs a comparison consists of, and in what order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.record import Run, holds_run
from merit_lab.report.gather import flatten, short_name
from merit_lab.train import TrainConfig


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be: its directory and its resolved configuration."""

    folder: Path
    config: TrainConfig

    @property
    def exists(self) -> bool:
        """Whether it was begun."""
        return holds_run(self.folder)


def plan(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Mapping[str, Sequence[float]],
) -> list[PlannedRun]:
    """Every optimizer at each of its learning rates with every seed; the seeds one after the other.

    So after the first seed there is a comparison already. An optimizer without learning rates has the
    paper's. Runs that are there already must be of this plan.
    """
    check_distinct("optimizers", optimizers)
    check_distinct("seeds", seeds)
    for name, rates in learning_rates.items():
        if name not in optimizers:
            raise ValueError(
                f"a learning rate is given for {name}, which is not among {', '.join(optimizers)}"
            )
        check_distinct(f"learning rates of {name}", rates)
    dataset = Dataset.open(base.data)
    planned = []
    for seed in seeds:
        for name in optimizers:
            for lr in learning_rates.get(name, [None]):
                optimizer = dataclasses.replace(base.optimizer, name=name, lr=lr)
                config = dataclasses.replace(base, optimizer=optimizer, seed=seed).resolve(dataset.vocab_size)
                run_name = f"{short_name(name)}-lr{config.optimizer.lr:g}-seed{seed}"
                planned.append(PlannedRun(folder / run_name, config))
    check_folders(planned, dataset, "runs of one comparison share their configuration")
    return planned


def parse_learning_rates(texts: Iterable[str]) -> dict[str, list[float]]:
    """Learning rates by optimizer from texts like "merit=9e-3".

    Example:
        >>> parse_learning_rates(["adamw=1e-3", "merit=9e-3", "merit=2e-2"])
        {'adamw': [0.001], 'merit': [0.009, 0.02]}
    """
    rates: dict[str, list[float]] = {}
    for text in texts:
        name, _, rate = text.partition("=")
        try:
            if not name:
                raise ValueError
            rates.setdefault(name, []).append(float(rate))
        except ValueError:
            raise ValueError(
                f"the learning rate {text!r} is not understood; write OPTIMIZER=RATE, as in merit=9e-3"
            ) from None
    return rates


def check_distinct(what: str, values: Sequence[object]) -> None:
    """Raise where ``values`` are none, or one is there twice."""
    if not values:
        raise ValueError(f"no {what} are given; at least one is needed")
    if len(set(values)) < len(values):
        raise ValueError(f"the {what} are {', '.join(map(str, values))}; each may be given once")


def check_same(run: Run, planned: TrainConfig, dataset: Dataset, rule: str) -> None:
    """Raise where a run of an earlier call is not the one that is planned; ``rule`` says what may differ."""
    before, now = flatten(TrainConfig.from_dict(run.config).to_dict()), flatten(planned.to_dict())
    differing = [field for field in now if field != "data" and before[field] != now[field]]
    if run.environment["data"]["fingerprint"] != dataset.fingerprint:
        differing.append("data")
    if differing:
        raise ValueError(
            f"{run.folder} holds a run with another {', '.join(differing)}; {rule}. Choose another folder "
            "with --out, or remove that run."
        )


def check_folders(planned: Sequence[PlannedRun], dataset: Dataset, rule: str) -> None:
    """Raise where two runs would be kept in one folder, or where another than the planned one is there."""
    first: dict[Path, PlannedRun] = {}
    for own in planned:
        if other := first.get(own.folder):
            one, two = flatten(other.config.to_dict()), flatten(own.config.to_dict())
            both = ", ".join(f"{name} {one[name]} and {two[name]}" for name in one if one[name] != two[name])
            raise ValueError(
                f"two runs with {both} would be kept in one folder, {own.folder}; give classes other names "
                "or take values further apart, or use two folders"
            )
        first[own.folder] = own
        if own.exists:
            check_same(Run.open(own.folder), own.config, dataset, rule)
