"""The trials of a scaling study, batch by batch, and the maximum length of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.results.gather import short_name
from merit_lab.runs import Run, RunInUse, run_folders
from merit_lab.scale.measure import Measurement, choose, measure, read_attempt, unfinished
from merit_lab.scale.page import make_page
from merit_lab.study.fields import with_values
from merit_lab.study.page import Page
from merit_lab.study.state import is_done
from merit_lab.study.study import Round
from merit_lab.study.trial import Trial, check_distinct, check_folders, check_same
from merit_lab.sweep.grid import check_rates
from merit_lab.train import TrainConfig

_SLACK = 1.25  # limit of a larger batch, in multiples of the steps that the next smaller one needed
_VALIDATIONS = 50  # per run; steps are interpolated between them
_RULE = "the runs of a scaling study differ in their optimizer, batch, learning rate, seed and length only"

Rates = Mapping[str, Mapping[int, Sequence[float]]]
"""Learning rates by optimizer and batch."""

Begun = dict[tuple[str, int, float, int], list[Trial]]
"""Existing runs by optimizer, batch, learning rate and seed."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A study of the steps to a target loss with growing batch sizes.

    Args:
        base: configuration that all runs share; its ``steps`` are the limit of every run.
        folder: folder of the run directories.
        target: the validation loss to reach.
        batches: batch sizes in sequences, in ascending order.
        rates: learning rates by optimizer and batch.
        seeds: each batch is trained once with every seed.
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
            raise ValueError(f"the target is {self.target}; it must be a validation loss in nats, above 0")
        if self.base.steps is None:
            raise ValueError(
                "the maximum number of steps is not given; pass --steps, with more than the smallest batch "
                "is expected to need"
            )
        for name, by_batch in self.rates.items():
            for rates in by_batch.values():
                check_rates(name, rates)

    def next(self) -> Round:
        """The trials of all batch sizes up to the first that is not done.

        The length of runs with a larger batch depends on the steps that the smaller one needed.
        """
        dataset = Dataset.open(self.base.data)
        begun = self._begun(dataset)
        trials: list[Trial] = []
        smaller: dict[str, Measurement] = {}
        for place, batch in enumerate(self.batches, start=1):
            more = self.plan(batch, smaller, begun, dataset)
            trials += more
            if not all(trial.exists for trial in more) or unfinished(measured := self.measure(more)):
                larger = self.batches[place:]
                later = [trial for size in larger for trial in self.plan(size, smaller, begun, dataset)]
                new = [trial for trial in later if not is_done(trial.folder)]
                return Round(trials, f"Batches of {batch} sequences", new)
            smaller |= {best.optimizer: best for best in choose(measured)}
        return Round(trials)

    def findings(self) -> Page:
        measurements = self.measure(self.next().trials)
        if names := unfinished(measurements):
            raise RunInUse(
                f"{', '.join(names)} is in use by another process, and the length of runs with larger "
                "batches depends on it; repeat the command when it is done"
            )
        return make_page(measurements, self.base, self.target, self.seeds)

    def measure(self, trials: Sequence[Trial]) -> list[Measurement]:
        """Read the measurements of trials."""
        return measure([trial.folder for trial in trials], self.target)

    def plan(
        self, batch: int, smaller: Mapping[str, Measurement], begun: Begun, dataset: Dataset
    ) -> list[Trial]:
        """The trials with one batch size, ordered by seed.

        ``smaller`` holds the measurements with the next smaller batch, by optimizer. A larger batch does not
        need more steps than a smaller one, so the limit is 1.25 times those. An existing run is used as it is
        if it reached the target, diverged, or is long enough.
        """
        planned = []
        for seed in self.seeds:
            for optimizer, by_batch in self.rates.items():
                steps = self._most_steps(smaller.get(optimizer))
                for lr in by_batch[batch]:
                    earlier = begun.get((optimizer, batch, lr, seed), [])
                    enough = (trial for trial in earlier if self._is_enough(trial, steps))
                    new = self._run(dataset, optimizer, batch, lr, seed, steps)
                    planned.append(next(enough, new))
        check_folders(planned, dataset, "every run needs a separate folder")
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
            "target": self.target,
        }
        config = with_values(self.base, values).resolve(dataset.vocab_size)
        name = f"{short_name(optimizer)}-batch{batch}-lr{lr:g}-steps{steps}-to{self.target:g}-seed{seed}"
        return Trial(self.folder / name, config)

    def _is_enough(self, earlier: Trial, steps: int) -> bool:
        assert earlier.config.steps is not None
        _, attempt = read_attempt(earlier.folder, self.target)
        if attempt.steps is not None or attempt.status == "diverged":
            return True
        stopped_early = attempt.status == "finished" and attempt.last_step < earlier.config.steps
        return earlier.config.steps >= steps and not stopped_early  # there, at a higher target

    def _begun(self, dataset: Dataset) -> Begun:
        """The existing runs of each optimizer, batch, learning rate and seed, the longest first.

        Raises ValueError if a run in the folder does not belong to this study.
        """
        begun: Begun = {}
        for folder in run_folders(self.folder):
            run = Run.open(folder)
            config = TrainConfig.from_dict(run.config)
            assert config.optimizer.lr is not None and config.steps is not None, (
                "a run's configuration is resolved"
            )
            key = config.optimizer.name, config.batch, config.optimizer.lr, config.seed
            planned = dataclasses.replace(self._run(dataset, *key, config.steps).config, target=config.target)
            check_same(run, planned, dataset, _RULE)
            here = dataclasses.replace(config, data=self.base.data)
            begun.setdefault(key, []).append(Trial(run.folder, here))
        for trials in begun.values():
            trials.sort(key=lambda trial: trial.config.steps or 0, reverse=True)
        return begun
