"""The trials of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.results.gather import short_name
from merit_lab.study.trial import Trial, check_distinct, check_folders
from merit_lab.train import TrainConfig


def plan(
    base: TrainConfig,
    folder: Path,
    *,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Mapping[str, Sequence[float]],
) -> list[Trial]:
    """Plan a trial for every optimizer, learning rate and seed.

    Trials are ordered by seed, so that there is a comparison after the first one. An optimizer without
    learning rates uses the paper's. Raises ValueError if an existing run differs from its trial.
    """
    check_distinct("optimizers", optimizers)
    check_distinct("seeds", seeds)
    for name, rates in learning_rates.items():
        if name not in optimizers:
            raise ValueError(
                f"a learning rate is given for {name}, which is not one of {', '.join(optimizers)}"
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
                planned.append(Trial(folder / run_name, config))
    check_folders(planned, dataset, "runs of one comparison share their configuration")
    return planned


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
