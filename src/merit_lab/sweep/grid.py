"""The runs of a sweep: every optimizer at each of its learning rates, with all values of other fields."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.compare.plan import parse_learning_rates
from merit_lab.data import Dataset
from merit_lab.record import Run, run_folders
from merit_lab.report.gather import short_name, show
from merit_lab.study.fields import LR, option_of, short, value_of, with_values
from merit_lab.study.trial import Trial, check_distinct, check_folders, check_same
from merit_lab.train import TrainConfig

# Where no learning rates are given: the paper's, and its neighbours by factors of two.
_AROUND_THE_PAPER = (0.25, 0.5, 1.0, 2.0, 4.0)
# Fields that are settled by others when a run begins, so that runs could not be told apart by them.
_SETTLED = {
    "steps": "every run has a length; give numbers",
    "tokens": "a run's length is kept in steps; use --set steps",
    "model.vocab_size": "the data decide it; add --no-fit-vocab",
    "optimizer.rest_lr": "every second optimizer has a rate; give numbers",
}
_RULE = "the runs of a sweep differ in their optimizer, learning rate, seed, and the fields of --set alone"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is varied around a base configuration, and where its runs lie.

    Args:
        base: what all runs share.
        folder: its runs are folders in here.
        learning_rates: by optimizer.
        fields: values of other fields, by their dotted names.
        seeds: each point of the grid is trained once with each.
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
            if (own := option_of(field)) and own[0] in self.fields:
                raise ValueError(
                    f"--set {own[0]} gives all options and --set {field} one of them; give each alone"
                )
        if self.base.measure.validation_every == 0:
            raise ValueError(
                "measure.validation_every is 0; a sweep chooses by the validation loss at the end of a run, "
                "so it must be at least 1"
            )

    def plan(self) -> list[Trial]:
        """All its runs, the seeds one after the other: after the first there is a whole grid already."""
        dataset = Dataset.open(self.base.data)
        planned = [
            self.run(dataset, optimizer, {LR: lr, **values}, seed)
            for seed in self.seeds
            for optimizer, rates in self.learning_rates.items()
            for values in self.combinations()
            for lr in rates
        ]
        self._check_existing(dataset)
        check_folders(planned, dataset, "every run has a folder of its own")
        return planned

    def combinations(self) -> list[dict[str, object]]:
        """Every combination of the other fields' values."""
        return [
            dict(zip(self.fields, values, strict=True)) for values in itertools.product(*self.fields.values())
        ]

    def run(self, dataset: Dataset, optimizer: str, values: Mapping[str, object], seed: int) -> Trial:
        """One run. ``values`` are the learning rate's and the other fields'."""
        config = self._config(dataset, optimizer, values, seed)
        for field in self.fields:
            if value_of(config, field) != values[field]:
                raise ValueError(f"--set {field} {show(values[field])}: {_SETTLED[field]}")
        others = [f"{short(name)}={show(values[name])}" for name in self.fields]
        words = [short_name(optimizer), f"lr{show(values[LR])}", *others, f"seed{seed}"]
        name = "-".join(words).replace(", ", ",").replace("/", "_")
        return Trial(self.folder / name, config)

    def _config(
        self, dataset: Dataset, optimizer: str, values: Mapping[str, object], seed: int
    ) -> TrainConfig:
        asked = with_values(self.base, {**values, "optimizer.name": optimizer, "seed": seed})
        return asked.resolve(dataset.vocab_size)

    def _check_existing(self, dataset: Dataset) -> None:
        """Every run in the folder must be one that this grid could have made.

        It may stand at another point of the grid, from an earlier call or an extension.
        """
        for folder in run_folders(self.folder):
            run = Run.open(folder)
            own = TrainConfig.from_dict(run.config)
            values = {field: value_of(own, field) for field in (LR, *self.fields)}
            point = self._config(dataset, own.optimizer.name, values, own.seed)
            check_same(run, point, dataset, _RULE)


def check_rates(optimizer: str, rates: Sequence[float]) -> None:
    """Raise where an optimizer has no learning rates, one twice, or one at which nothing is learnt."""
    check_distinct(f"learning rates of {optimizer}", rates)
    if min(rates) <= 0:
        raise ValueError(f"a learning rate of {optimizer} is {min(rates):g}; it must be above 0")


def choose_learning_rates(
    base: TrainConfig, optimizers: Sequence[str], texts: Iterable[str]
) -> dict[str, list[float]]:
    """Rising learning rates by optimizer; one that is given none gets the paper's and its neighbours."""
    given = parse_shared_learning_rates(optimizers, texts)
    return {name: sorted(rates or _paper_rates(base, name)) for name, rates in given.items()}


def parse_shared_learning_rates(optimizers: Sequence[str], texts: Iterable[str]) -> dict[str, list[float]]:
    """Learning rates by optimizer as they are given: "1e-3" is for all, "merit=1e-3" for one alone.

    Example:
        >>> parse_shared_learning_rates(["lamb", "merit"], ["1e-3", "merit=2e-3"])
        {'lamb': [0.001], 'merit': [0.001, 0.002]}
    """
    check_distinct("optimizers", optimizers)
    given = list(texts)
    shared, own = [text for text in given if "=" not in text], [text for text in given if "=" in text]
    rates = parse_learning_rates([*(f"{name}={rate}" for name in optimizers for rate in shared), *own])
    for name in rates:
        if name not in optimizers:
            raise ValueError(
                f"a learning rate is given for {name}, which is not among {', '.join(optimizers)}"
            )
    return {name: rates.get(name, []) for name in optimizers}


def _paper_rates(base: TrainConfig, optimizer: str) -> list[float]:
    lr = with_values(base, {"optimizer.name": optimizer, LR: None}).optimizer.resolve(base.model).lr
    assert lr is not None
    return [float(f"{lr * factor:.6g}") for factor in _AROUND_THE_PAPER]
