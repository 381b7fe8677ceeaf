"""A trial: one run of a study, with its directory and its whole configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.record import Run, holds_run
from merit_lab.report.gather import flatten
from merit_lab.train import Bar, TrainConfig


@dataclass(frozen=True)
class Trial:
    """A run that is to be: its directory and its resolved configuration."""

    folder: Path
    config: TrainConfig
    bars: tuple[Bar, ...] = ()
    """It is given up where it is above one of them."""

    @property
    def exists(self) -> bool:
        """Whether it was begun."""
        return holds_run(self.folder)

    @property
    def status(self) -> str:
        """That of its run; "planned" where it was not begun."""
        return Run.open(self.folder).status if self.exists else "planned"


def check_distinct(what: str, values: Sequence[object]) -> None:
    """Raise where ``values`` are none, or one is there twice."""
    if not values:
        raise ValueError(f"no {what} are given; at least one is needed")
    if len(set(values)) < len(values):
        raise ValueError(f"the {what} are {', '.join(map(str, values))}; each may be given once")


def check_same(run: Run, planned: TrainConfig, dataset: Dataset, rule: str) -> None:
    """Raise where a run of an earlier call is not the one that is planned; ``rule`` says what may differ."""
    before, now = flatten(TrainConfig.from_dict(run.config).to_dict()), flatten(planned.to_dict())
    # A configuration without a second optimizer has no fields of it.
    differing = [f for f in {**before, **now} if f != "data" and before.get(f) != now.get(f)]
    if run.environment["data"]["fingerprint"] != dataset.fingerprint:
        differing.append("data")
    if differing:
        raise ValueError(
            f"{run.folder} holds a run with another {', '.join(differing)}; {rule}. Choose another folder "
            "with --out, or remove that run."
        )


def check_folders(planned: Sequence[Trial], dataset: Dataset, rule: str) -> None:
    """Raise where two runs would be kept in one folder, or where another than the planned one is there."""
    first: dict[Path, Trial] = {}
    for own in planned:
        if other := first.get(own.folder):
            one, two = flatten(other.config.to_dict()), flatten(own.config.to_dict())
            both = ", ".join(
                f"{name} {one.get(name)} and {two.get(name)}"
                for name in {**one, **two}
                if one.get(name) != two.get(name)
            )
            raise ValueError(
                f"two runs with {both} would be kept in one folder, {own.folder}; give classes other names "
                "or take values further apart, or use two folders"
            )
        first[own.folder] = own
        if own.exists:
            check_same(Run.open(own.folder), own.config, dataset, rule)
