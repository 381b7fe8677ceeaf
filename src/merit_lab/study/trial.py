"""A trial: one run of a study, with its directory and its full configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.results.series import makes_a_series
from merit_lab.runs import OVER, Run, holds_run, is_locked
from merit_lab.train import CheckpointConfig, MeasureConfig, TrainConfig

_DONE: set[Path] = set()  # runs that are over are not read again


@dataclass(frozen=True)
class Trial:
    """A planned run: its directory and its resolved configuration."""

    folder: Path
    config: TrainConfig

    @property
    def exists(self) -> bool:
        """Whether the run was started."""
        return holds_run(self.folder)

    @property
    def is_done(self) -> bool:
        """Whether the run has finished, diverged or been abandoned."""
        folder = self.folder.resolve()  # what is known must not depend on the current folder
        if not self.exists:
            return False
        if folder not in _DONE and not is_locked(folder) and Run.open(folder).outcome in OVER:
            _DONE.add(folder)
        return folder in _DONE

    @property
    def steps_done(self) -> int:
        """The steps that need not be trained any more: all of a run that is over, even if it diverged."""
        if self.is_done:
            return self.config.steps or 0
        lines = Run.open(self.folder).metrics("train") if self.exists else []
        return int(lines[-1]["step"]) if lines else 0


def settings_of(config: TrainConfig) -> str:
    """A hash of what is trained; how often it is measured and saved is not part of that."""
    measure = MeasureConfig(validation_sequences=config.measure.validation_sequences)
    return replace(config, measure=measure, checkpoint=CheckpointConfig()).fingerprint


def check_distinct(noun: str, values: Sequence[object]) -> None:
    """Raise ValueError if ``values`` is empty or has duplicates."""
    if not values:
        raise ValueError(f"no {noun} are given; at least one is needed")
    if len(set(values)) < len(values):
        raise ValueError(f"the {noun} are {', '.join(map(str, values))}; each may be given only once")


def check_folders(trials: Sequence[Trial], datasets: Mapping[Path, Dataset]) -> None:
    """Raise ValueError if the folder of a trial holds a run with other settings or data."""
    for trial in trials:
        if not trial.exists:
            continue
        run = Run.open(trial.folder)
        differences = TrainConfig.from_dict(run.config).differences(trial.config)
        # How often a run measured changes nothing.
        differing = [name for name in differences if makes_a_series(name) or name == "seed"]
        if run.data_fingerprint != datasets[trial.config.data].fingerprint:
            differing.append("data")
        if differing:
            raise ValueError(
                f"{run.folder} holds a run with a different {', '.join(differing)}; choose another folder "
                "with --out"
            )
