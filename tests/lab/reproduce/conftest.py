"""A scale far below tiny, and data to train on."""

import logging
from pathlib import Path

import numpy as np
import pytest
from toy_scale import make_scale

from merit_optim.lab.data import Dataset
from merit_optim.lab.reproduce.scale import Scale


@pytest.fixture
def toy() -> Scale:
    return make_scale()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens as nanoGPT writes it."""
    folder = tmp_path_factory.mktemp("data")
    tokens = np.random.default_rng(0).integers(0, 8, 6000).astype(np.uint16)
    tokens[:5000].tofile(folder / "train.bin")
    tokens[5000:].tofile(folder / "val.bin")
    return folder


@pytest.fixture
def dataset(data: Path) -> Dataset:
    return Dataset.open(data)


@pytest.fixture(autouse=True)
def _quiet_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    """torch tells of every tensor of a checkpoint, which would bury a failure."""
    caplog.set_level(logging.WARNING, logger="c10d-NullHandler-dcp_logger")
