"""Data and a model small enough to be trained in a test."""

from pathlib import Path

import numpy as np
import pytest

MODEL = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]
LENGTH = ["--batch=4", "--steps=3", "--measure.validation-sequences=8", "--measure.attention-every=1"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of tokens as nanoGPT writes it."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    tokens[:3000].tofile(folder / "train.bin")
    tokens[3000:].tofile(folder / "val.bin")
    return folder


@pytest.fixture
def command(data: Path, tmp_path: Path) -> list[str]:
    """A comparison of three steps, to which options can be added."""
    return ["tiny", "--data", str(data), "--out", str(tmp_path / "out"), *MODEL, *LENGTH]
