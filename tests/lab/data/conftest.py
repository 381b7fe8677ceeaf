"""Token files for the tests of the data."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from merit_lab.data import TokenFile


@pytest.fixture
def token_file(tmp_path: Path) -> Callable[..., TokenFile]:
    """Write a file of the tokens 0, 1, 2, ..., or of those given."""

    def write(num_tokens: int, dtype: str = "uint16", name: str = "tokens.bin") -> TokenFile:
        np.arange(num_tokens, dtype=dtype).tofile(tmp_path / name)
        return TokenFile.open(tmp_path / name, dtype)

    return write
