"""The trials of a sweep: every optimizer at each learning rate, with all values of the other fields."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.compare.plan import parse_learning_rates
from merit_lab.data import Dataset
from merit_lab.results.gather import short_name
from merit_lab.runs import Run, run_folders
from merit_lab.runs.settings import show
from merit_lab.study.fields import LR, option_of, short, value_of, with_values
from merit_lab.study.trial import Trial, check_distinct, check_folders, check_same
from merit_lab.train import TrainConfig

# Factors of the default learning rates, around the paper's.
_AROUND_THE_PAPER = (0.25, 0.5, 1.0, 2.0, 4.0)
# Fields whose value may be replaced when a run starts, so that they could not distinguish runs.
_REPLACED = {
    "steps": "every run has a length; give numbers",
    "tokens": "a run's length is kept in steps; use --set steps",
    "model.vocab_size": "the data decide it; add --no-fit-vocab",
    "optimizer.rest_lr": "every second optimizer has a rate; give numbers",
}
_RULE = "the runs of a sweep differ in their optimizer, learning rate, seed, and the fields of --set only"


@dataclass(frozen=True, kw_only=True)
class SweepGrid:
    """A grid of settings around a base configuration.

    Args:
        base: configuration that all runs share.
        folder: folder of the run directories.
        learning_rates: learning rates by optimizer.
        fields: values of other fields, by their dotted names.
        seeds: each point of the grid is trained once with every seed.
    """

    base: TrainConfig
    folder: Path
    learning_rates: Mapping[str, Sequence[float]]
    fields: Mapping[str, Sequence[object]]
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        check_distinct("optimizers", list(self.learning_rates))
        check_distinct("seeds", self.seeds)
        for name, rates in self.learning_rates.items():
            check_rates(name, rates)
        for field, values in self.fields.items():
            check_distinct(f"values of {field}", values)
            if (path := option_of(field)) and path[0] in self.fields:
                raise ValueError(
                    f"--set {path[0]} sets all options and --set {field} one of them; use only one of the two"
                )
        if self.base.measure.validation_every == 0:
            raise ValueError(
                "measure.validation_every is 0; a sweep compares final validation losses, so it must be "
                "at least 1"
            )

    def plan(self) -> list[Trial]:
        """All its trials, ordered by seed, so that there is a complete grid after the first one."""
        dataset = Dataset.open(self.base.data)
        planned = [
            self.run(dataset, optimizer, {LR: lr, **values}, seed)
            for seed in self.seeds
            for optimizer, rates in self.learning_rates.items()
            for values in self.combinations()
            for lr in rates
        ]
        self._check_existing(dataset)
        check_folders(planned, dataset, "every run needs a separate folder")
        return planned

    def combinations(self) -> list[dict[str, object]]:
        """Every combination of the other fields' values."""
        return [
            dict(zip(self.fields, values, strict=True)) for values in itertools.product(*self.fields.values())
        ]

    def run(self, dataset: Dataset, optimizer: str, values: Mapping[str, object], seed: int) -> Trial:
        """One trial. ``values`` are those of the learning rate and of the other fields."""
        config = self._config(dataset, optimizer, values, seed)
        for field in self.fields:
            if value_of(config, field) != values[field]:
                raise ValueError(f"--set {field} {show(values[field])}: {_REPLACED[field]}")
        others = [f"{short(name)}={show(values[name])}" for name in self.fields]
        parts = [short_name(optimizer), f"lr{show(values[LR])}", *others, f"seed{seed}"]
        name = "-".join(parts).replace(", ", ",").replace("/", "_")
        return Trial(self.folder / name, config)

    def _config(
        self, dataset: Dataset, optimizer: str, values: Mapping[str, object], seed: int
    ) -> TrainConfig:
        config = with_values(self.base, {**values, "optimizer.name": optimizer, "seed": seed})
        return config.resolve(dataset.vocab_size)

    def _check_existing(self, dataset: Dataset) -> None:
        """Raise if a run in the folder does not belong to this sweep.

        Runs at other points are allowed: they come from an earlier call or an extension.
        """
        for folder in run_folders(self.folder):
            run = Run.open(folder)
            config = TrainConfig.from_dict(run.config)
            values = {field: value_of(config, field) for field in (LR, *self.fields)}
            point = self._config(dataset, config.optimizer.name, values, config.seed)
            check_same(run, point, dataset, _RULE)


def check_rates(optimizer: str, rates: Sequence[float]) -> None:
    """Raise if an optimizer has no learning rates, duplicates, or one that is not above 0."""
    check_distinct(f"learning rates of {optimizer}", rates)
    if min(rates) <= 0:
        raise ValueError(f"a learning rate of {optimizer} is {min(rates):g}; it must be above 0")


def choose_learning_rates(
    base: TrainConfig, optimizers: Sequence[str], texts: Iterable[str]
) -> dict[str, list[float]]:
    """Ascending learning rates by optimizer; by default the paper's and its neighbours."""
    by_optimizer = parse_shared_learning_rates(optimizers, texts)
    return {name: sorted(rates or _paper_rates(base, name)) for name, rates in by_optimizer.items()}


def parse_shared_learning_rates(optimizers: Sequence[str], texts: Iterable[str]) -> dict[str, list[float]]:
    """Parse learning rates by optimizer: "1e-3" applies to all optimizers, "merit=1e-3" to one.

    Example:
        >>> parse_shared_learning_rates(["lamb", "merit"], ["1e-3", "merit=2e-3"])
        {'lamb': [0.001], 'merit': [0.001, 0.002]}
    """
    check_distinct("optimizers", optimizers)
    rates = parse_learning_rates(texts, everyone=optimizers)
    for name in rates:
        if name not in optimizers:
            raise ValueError(
                f"a learning rate is given for {name}, which is not one of {', '.join(optimizers)}"
            )
    return {name: rates.get(name, []) for name in optimizers}


def _paper_rates(base: TrainConfig, optimizer: str) -> list[float]:
    lr = with_values(base, {"optimizer.name": optimizer, LR: None}).optimizer.resolve(base.model).lr
    assert lr is not None
    return [float(f"{lr * factor:.6g}") for factor in _AROUND_THE_PAPER]
