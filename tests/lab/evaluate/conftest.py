import logging
import os
import tarfile
from pathlib import Path

import pytest

from merit_optim.lab.evaluate import SETS


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real data, which lie beside the repository or where MERIT_SHARED_DATA says."""
    beside = Path(__file__).parents[3].parent / "shared" / "data"
    folder = Path(os.environ.get("MERIT_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"needs the real data: no folder {folder}; MERIT_SHARED_DATA names another")
    return folder


@pytest.fixture(scope="session")
def task_files(shared_data, tmp_path_factory) -> Path:
    """The real sets, unpacked."""
    folder = tmp_path_factory.mktemp("sets")
    wanted = {f"eval/{chosen.file}" for chosen in SETS.values()}
    with tarfile.open(shared_data / "eval.tar.xz") as archive:
        archive.extractall(folder, (m for m in archive if m.name in wanted), filter="data")
    return folder / "eval"


@pytest.fixture(autouse=True)
def _quiet_checkpoints(caplog):
    """torch tells of every tensor of a checkpoint, which would bury a failure."""
    caplog.set_level(logging.WARNING, logger="c10d-NullHandler-dcp_logger")


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """What an evaluation sets for its process ends with the test."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
