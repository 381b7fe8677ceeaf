"""Data small enough to train on in a test."""

from pathlib import Path

import numpy as np
import pytest

SMALLEST = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]
MEASURED = ["--measure.validation-sequences=8", "--measure.attention-every=0"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of tokens in nanoGPT's format: a short repeating sequence, which is learnt quickly."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.tile(np.arange(10), 400).astype(np.uint16)
    tokens[:3000].tofile(folder / "train.bin")
    tokens[3000:].tofile(folder / "val.bin")
    return folder


@pytest.fixture
def command(data: Path, tmp_path: Path) -> list[str]:
    """A study of a tiny model, to which options can be added."""
    return ["tiny", "--data", str(data), "--out", str(tmp_path / "out"), *SMALLEST, *MEASURED]
