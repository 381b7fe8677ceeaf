"""The device of the optimizer tests, the CPU and under ``pytest -m gpu`` a GPU too; a fake process group."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that uses this runs once per device."""
    return torch.device(request.param)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of which only one rank exists: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
