"""Where the fused engine's kernels run: on a CUDA GPU, or, where there is none, in Triton's interpreter.

tests/conftest.py imports them with TRITON_INTERPRET=1; each test of this folder has it set too, and no other.
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
    """Lets ``fused=True`` be had for tensors on the CPU."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with chunks_of(2):
        yield


@pytest.fixture
def chunks_as_on_a_gpu(interpreter: None) -> Iterator[None]:
    """For tests of every shape, on which a kernel's indices depend: options change none."""
    del interpreter
    with chunks_of(CHUNK):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that asks for it runs once for each device."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("the kernels are compiled for the GPU here: run these with -m gpu")
    return torch.device(request.param)


@pytest.fixture
def memory_begins_as_nan() -> Iterator[None]:
    """What is read and was never written is seen; else it may be what the test before left there."""
    if not INTERPRETED:
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
