"""Run the fused engine's kernels on a CUDA GPU or, without one, in Triton's interpreter.

tests/conftest.py imports them with TRITON_INTERPRET=1; it is also set in the tests of this folder, and in no
others.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED and find_spec("triton"):
    from interpreting import CHUNK, chunks_of, patch_once

    patch_once()
else:
    CHUNK, chunks_of = None, nullcontext


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes ``fused=True`` available for tensors on the CPU."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with chunks_of(2):
        yield


@pytest.fixture
def chunks_as_on_a_gpu(interpreter: None) -> Iterator[None]:
    """For tests of every shape, because a kernel's indices depend on shapes; options do not change them."""
    del interpreter
    with chunks_of(CHUNK):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that uses this runs once per device."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("the kernels are compiled for the GPU here: run these with -m gpu")
    return torch.device(request.param)


@pytest.fixture
def memory_begins_as_nan() -> Iterator[None]:
    """Reveals reads of memory that was never written, which may hold the results of an earlier test."""
    if not INTERPRETED:
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
