"""A run to measure the noise scale of."""

import logging
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from merit_optim.lab.models import ModelConfig
from merit_optim.lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig, train


@pytest.fixture(autouse=True)
def _quiet_checkpoints(caplog):
    """torch tells of every tensor of a checkpoint, which would bury a failure."""
    caplog.set_level(logging.WARNING, logger="c10d-NullHandler-dcp_logger")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run with the checkpoints of steps 4 and 6, on bytes of Python sources."""
    folder = tmp_path_factory.mktemp("noise")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    tokens = np.frombuffer(b"".join(path.read_bytes() for path in sources), dtype=np.uint8).astype("<u2")
    tokens[:100_000].tofile(folder / "train.bin")
    tokens[100_000:110_000].tofile(folder / "val.bin")
    config = TrainConfig(
        data=folder,
        model=ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(validation_every=0, attention_every=0, entropy_every=0, update_every=0),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=0),
        batch=8,
        steps=6,
    )
    return train(config, folder / "run").folder


@pytest.fixture
def run(trained, tmp_path):
    """The directory of the run, in a copy of the test's own."""
    return shutil.copytree(trained, tmp_path / "run")
