"""An arena that takes a moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_arena
import pytest

from merit_lab.arena.command import main
from merit_lab.study import runner
from merit_lab.train import TrainConfig


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that were trained, with losses by a formula."""
    folders: list[Path] = []

    def train(config: TrainConfig, folder: Path, **more: Any) -> None:
        folders.append(folder)
        fake_arena.train(config, folder, **more)

    monkeypatch.setattr(runner, "train", train)
    return folders


@pytest.fixture
def arena(data: Path, tmp_path: Path) -> Callable[..., int]:
    """Run an arena in out/ with options; a later --optimizers replaces the default contestants."""
    arguments = fake_arena.arguments(data, tmp_path / "out")
    return lambda *more: main([*arguments, "--optimizers", *fake_arena.CONTESTANTS, *more])
