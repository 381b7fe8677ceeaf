"""What the tests of the data share: token files, and the folder of real data where there is one."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from merit_optim.lab.data import TokenFile


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., TokenFile]:
    """Write a file of the tokens 0, 1, 2, ..., or of those given."""

    def write(num_tokens: int, dtype: str = "uint16", name: str = "tokens.bin") -> TokenFile:
        np.arange(num_tokens, dtype=dtype).tofile(tmp_path / name)
        return TokenFile.open(tmp_path / name, dtype)

    return write


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; tests that use it are skipped where it is absent."""
    beside = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("MERIT_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"needs the real data: no folder {folder}; MERIT_SHARED_DATA names another")
    return folder
