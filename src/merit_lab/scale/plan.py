"""The runs of a scaling study, batch by batch, and how long each may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.record import Run, RunInUse, run_folders
from merit_lab.report.gather import short_name
from merit_lab.scale.measure import Measurement, choose, measure, read_attempt, unfinished
from merit_lab.scale.page import make_page
from merit_lab.study.fields import with_values
from merit_lab.study.page import Page
from merit_lab.study.study import Round
from merit_lab.study.trial import Trial, check_distinct, check_folders, check_same
from merit_lab.sweep.grid import check_rates
from merit_lab.train import TrainConfig

_SLACK = 1.25  # a larger batch gets this many times the steps that the next smaller one needed
_VALIDATIONS = 50  # of each run, between which steps are interpolated
_RULE = "the runs of a scaling study differ in their optimizer, batch, learning rate, seed and length alone"

Rates = Mapping[str, Mapping[int, Sequence[float]]]
"""Learning rates by optimizer and batch."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Batch sizes up to which more data in a step is to be tried.

    Args:
        base: what all runs share; its ``steps`` are the most that any run may take.
        folder: its runs are folders in here.
        target: the validation loss to reach.
        batches: rising batch sizes, in sequences.
        rates: learning rates by optimizer and batch.
        seeds: each is trained once with each.
    """

    base: TrainConfig
    folder: Path
    target: float
    batches: Sequence[int]
    rates: Rates
    seeds: Sequence[int]

    def __post_init__(self) -> None:
        check_distinct("optimizers", list(self.rates))
        check_distinct("seeds", self.seeds)
        check_distinct("batches", self.batches)
        if not (math.isfinite(self.target) and self.target > 0):
            raise ValueError(f"the target is {self.target}; it is a validation loss in nats, above 0")
        if self.base.steps is None:
            raise ValueError(
                "the most steps a run may take are not given; pass --steps, more than the smallest batch is "
                "thought to need"
            )
        for name, by_batch in self.rates.items():
            for rates in by_batch.values():
                check_rates(name, rates)

    def next(self) -> Round:
        """The runs with all batch sizes up to the first that is not done.

        How long those with a larger batch may be follows from what the smaller one needed.
        """
        asked: list[Trial] = []
        for place, batch in enumerate(self.batches, start=1):
            # Of several batches the last is the largest.
            smaller = {own.optimizer: own for own in choose(self.measure(asked))}
            more = self.plan(batch, smaller)
            asked += more
            if not all(own.exists for own in more) or unfinished(self.measure(more)):
                later = len(more) * (len(self.batches) - place)
                return Round(asked, f"Batches of {batch} sequences", later)
        return Round(asked)

    def findings(self) -> Page:
        measurements = self.measure(self.next().trials)
        if names := unfinished(measurements):
            raise RunInUse(
                f"{', '.join(names)} is being worked on by another process, and how long larger batches may "
                "train depends on it; repeat the command when it is done"
            )
        return make_page(measurements, self.base, self.target, self.seeds)

    def measure(self, trials: Sequence[Trial]) -> list[Measurement]:
        """What the runs came to."""
        return measure([own.folder for own in trials], self.target)

    def plan(self, batch: int, smaller: Mapping[str, Measurement]) -> list[Trial]:
        """The runs with one batch size, the seeds one after the other.

        ``smaller`` is what was measured with the next smaller batch, by optimizer: no larger batch needs
        more steps, so that is its limit, and a quarter more. A run that is there already is taken as it is
        if it reached the target, diverged, or is long enough.
        """
        dataset = Dataset.open(self.base.data)
        begun = self._begun(dataset)
        planned = []
        for seed in self.seeds:
            for optimizer, by_batch in self.rates.items():
                steps = self._most_steps(smaller.get(optimizer))
                for lr in by_batch[batch]:
                    earlier = begun.get((optimizer, batch, lr, seed))
                    if earlier is not None and self._is_enough(earlier, steps):
                        planned.append(earlier)
                    else:
                        planned.append(self._run(dataset, optimizer, batch, lr, seed, steps))
        check_folders(planned, dataset, "every run has a folder of its own")
        return planned

    def _most_steps(self, smaller: Measurement | None) -> int:
        assert self.base.steps is not None
        if smaller is None or not smaller.is_reached:
            return self.base.steps
        return min(self.base.steps, math.ceil(_SLACK * max(smaller.steps)))

    def _run(self, dataset: Dataset, optimizer: str, batch: int, lr: float, seed: int, steps: int) -> Trial:
        values = {
            "optimizer.name": optimizer,
            "optimizer.lr": lr,
            "batch": batch,
            "seed": seed,
            "steps": steps,
            "measure.validation_every": math.ceil(steps / _VALIDATIONS),
        }
        config = with_values(self.base, values).resolve(dataset.vocab_size)
        name = f"{short_name(optimizer)}-batch{batch}-lr{lr:g}-steps{steps}-seed{seed}"
        return Trial(self.folder / name, config)

    def _is_enough(self, earlier: Trial, steps: int) -> bool:
        assert earlier.config.steps is not None
        _, attempt = read_attempt(earlier.folder, self.target)
        settled = attempt.steps is not None or attempt.status == "diverged"
        return settled or earlier.config.steps >= steps

    def _begun(self, dataset: Dataset) -> dict[tuple[str, int, float, int], Trial]:
        """The longest run there is of each optimizer, batch, learning rate and seed.

        Every run in the folder must be one that this study could have made.
        """
        found: dict[tuple[str, int, float, int], Trial] = {}
        for folder in run_folders(self.folder):
            run = Run.open(folder)
            own = TrainConfig.from_dict(run.config)
            assert own.optimizer.lr is not None and own.steps is not None, "a run's configuration is resolved"
            key = own.optimizer.name, own.batch, own.optimizer.lr, own.seed
            check_same(run, self._run(dataset, *key, own.steps).config, dataset, _RULE)
            if key not in found or (found[key].config.steps or 0) < own.steps:
                found[key] = Trial(run.folder, dataclasses.replace(own, data=self.base.data))
        return found
