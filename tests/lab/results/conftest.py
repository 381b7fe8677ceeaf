"""Run directories for the tests of reports."""

from pathlib import Path

import pytest
from written_runs import write_run, write_three_seeds


@pytest.fixture
def one_seed(tmp_path: Path) -> Path:
    """A folder with one finished run of each of three optimizers."""
    folder = tmp_path / "runs"
    for optimizer, lr in (("adamw", 1e-3), ("lamb", 1e-2), ("merit", 9e-3)):
        write_run(folder, optimizer, lr=lr)
    return folder


@pytest.fixture
def three_seeds(tmp_path: Path) -> Path:
    """Three seeds of each optimizer; one AdamW run diverged and one LAMB run was killed."""
    return write_three_seeds(tmp_path / "runs")
