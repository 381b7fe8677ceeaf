"""The device the optimizer tests run on: the CPU always, and a CUDA GPU under ``pytest -m gpu``."""

import pytest
import torch
from hypothesis import settings

# The same examples in every run, and no limit on the time of one: the first example compiles or warms up.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that asks for it runs once for each device."""
    return torch.device(request.param)
