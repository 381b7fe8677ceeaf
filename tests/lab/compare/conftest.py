"""A comparison that takes a second."""

from pathlib import Path

import pytest

MODEL = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]
LENGTH = ["--batch=4", "--steps=3", "--measure.validation-sequences=8", "--measure.attention-every=1"]


@pytest.fixture
def command(data: Path, tmp_path: Path) -> list[str]:
    """A comparison of three steps, to which options can be added."""
    return ["tiny", "--data", str(data), "--out", str(tmp_path / "out"), *MODEL, *LENGTH]
