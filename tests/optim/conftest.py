"""The device the optimizer tests run on: the CPU always, and a CUDA GPU under ``pytest -m gpu``."""

import pytest
import torch


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that uses this runs once per device."""
    return torch.device(request.param)
