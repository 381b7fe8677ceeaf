"""What the tests of the lab share: data to train on, a run to measure, the real data, a browser."""

import contextlib
import logging
import os
import resource
import shutil
import sysconfig
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import chromium
import numpy as np
import pytest

pytest.importorskip("polars", reason="needs polars")

from merit_lab.measure.evaluate.sets import SETS
from merit_lab.models import ModelConfig
from merit_lab.runs import keep_command
from merit_lab.study import cost
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig, train

# Nothing here to run as an example; and pytest, coming from the folder before, would take it for that one's.
collect_ignore = ["conftest.py"]
# torch tells of every tensor of a checkpoint, which would bury a failure.
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def _estimates_in_a_moment() -> Iterator[None]:
    """A study measures this machine's speed for a second before it starts; here for a few passes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cost, "_SECONDS_TO_MEASURE", 0.02)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens as nanoGPT writes it: bytes of Python sources."""
    folder = tmp_path_factory.mktemp("data")
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    tokens = np.frombuffer(b"".join(path.read_bytes() for path in sources), dtype=np.uint8).astype("<u2")
    tokens[:100_000].tofile(folder / "train.bin")
    tokens[100_000:110_000].tofile(folder / "val.bin")
    return folder


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run with the checkpoints of steps 4 and 6."""
    config = TrainConfig(
        data=data,
        model=ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256),
        optimizer=OptimizerConfig(lr=1e-2),
        measure=MeasureConfig(validation_every=0, attention_every=0, entropy_every=0, update_every=0),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=0),
        batch=8,
        steps=6,
    )
    return train(config, tmp_path_factory.mktemp("trained") / "run").folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """The directory of that run, in a copy of the test's own."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def keep_only() -> Callable[[Path], None]:
    """Keeps the runs of a folder in a file, and removes their directories."""

    def keep(folder: Path) -> None:
        assert keep_command.main([str(folder), "--out", str(folder)]) == 0
        for config in folder.glob("*/config.json"):
            shutil.rmtree(config.parent)

    return keep


@pytest.fixture
def no_file_larger_than() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A limit for the files of this process. Writes beyond it fail halfway, as on a full disk."""

    @contextlib.contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real data, which lie beside the repository or where MERIT_SHARED_DATA says."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("MERIT_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"needs the real data: no folder {folder}; MERIT_SHARED_DATA names another")
    return folder


@pytest.fixture(scope="session")
def task_files(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real evaluation sets, unpacked."""
    folder = tmp_path_factory.mktemp("sets")
    wanted = {f"eval/{chosen.file}" for chosen in SETS.values()}
    with tarfile.open(shared_data / "eval.tar.xz") as archive:
        for member in archive:  # extractall's filter came with Python 3.11.4
            if member.name in wanted and (content := archive.extractfile(member)) is not None:
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    return folder / "eval"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an evaluation sets for its process ends with the test."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="session")
def browser() -> str:
    """The path of a browser."""
    path = chromium.find()
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(chromium.NAMES)} is installed")
    return path
