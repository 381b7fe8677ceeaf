"""A trial: one run of a study, with its directory and its full configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.runs import Run, holds_run
from merit_lab.train import Bar, TrainConfig


@dataclass(frozen=True)
class Trial:
    """A planned run: its directory and its resolved configuration."""

    folder: Path
    config: TrainConfig
    bars: tuple[Bar, ...] = ()
    """The run is abandoned if its loss is above one of them."""

    @property
    def exists(self) -> bool:
        """Whether the run was started."""
        return holds_run(self.folder)

    @property
    def status(self) -> str:
        """The status of its run; "planned" if it was not started."""
        return Run.open(self.folder).status if self.exists else "planned"


def check_distinct(noun: str, values: Sequence[object]) -> None:
    """Raise if ``values`` is empty or has duplicates."""
    if not values:
        raise ValueError(f"no {noun} are given; at least one is needed")
    if len(set(values)) < len(values):
        raise ValueError(f"the {noun} are {', '.join(map(str, values))}; each may be given only once")


def check_same(run: Run, planned: TrainConfig, dataset: Dataset, rule: str) -> None:
    """Raise if an existing run is not the planned one; ``rule`` says which fields may differ."""
    differing = list(TrainConfig.from_dict(run.config).differences(planned))
    if run.data_fingerprint != dataset.fingerprint:
        differing.append("data")
    if differing:
        raise ValueError(
            f"{run.folder} holds a run with a different {', '.join(differing)}; {rule}. Choose another "
            "folder with --out, or remove that run."
        )


def check_folders(planned: Sequence[Trial], dataset: Dataset, rule: str) -> None:
    """Raise if two runs would share a folder, or if a folder holds another run than the planned one."""
    first: dict[Path, Trial] = {}
    for trial in planned:
        if other := first.get(trial.folder):
            differences = other.config.differences(trial.config)
            both = ", ".join(f"{name} {one} and {two}" for name, (one, two) in differences.items())
            raise ValueError(
                f"two runs with {both} would share the folder {trial.folder}; rename one of the classes, "
                "choose values further apart, or use two folders"
            )
        first[trial.folder] = trial
        if trial.exists:
            check_same(Run.open(trial.folder), trial.config, dataset, rule)
