"""A sweep that takes seconds, and run directories as training would leave them."""

from pathlib import Path

import pytest
from sweep_runs import WriteRun, write_finished_run

from merit_lab.models import PRESETS
from merit_lab.study.fields import with_values
from merit_lab.train import TrainConfig

SMALLEST = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]
LENGTH = ["--batch=4", "--steps=2", "--measure.validation-sequences=8", "--measure.attention-every=0"]


@pytest.fixture
def base(data: Path) -> TrainConfig:
    """The configuration that the runs of ``write_run`` share."""
    return TrainConfig(data=data, model=PRESETS["tiny"], batch=4, steps=10)


@pytest.fixture
def write_run(base: TrainConfig, tmp_path: Path) -> WriteRun:
    """Write a run into out/ that ended with a loss; None means that it diverged."""

    def write(
        optimizer: str,
        lr: float,
        loss: float | None,
        *,
        seed: int = 0,
        end: str = "finished",
        weight_decay: float = 0.1,
        width: int = 64,
        layers: int = 4,
    ) -> None:
        values = {
            "optimizer.name": optimizer,
            "optimizer.lr": lr,
            "optimizer.weight_decay": weight_decay,
            "model.width": width,
            "model.layers": layers,
            "seed": seed,
        }
        name = "-".join(map(str, values.values()))
        write_finished_run(with_values(base, values), tmp_path / "out" / name, loss, end)

    return write


@pytest.fixture
def command(data: Path, tmp_path: Path) -> list[str]:
    """A sweep of two steps a run, to which options can be added."""
    return ["tiny", "--data", str(data), "--out", str(tmp_path / "out"), *SMALLEST, *LENGTH]
