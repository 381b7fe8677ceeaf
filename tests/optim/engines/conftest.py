"""Where the fused engine's kernels run: on a CUDA GPU, or, where there is none, in Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted. So the kernels are imported here, with
the variable set, before any test is; each test of this folder then has it set too, and no other test.
"""

from importlib.util import find_spec

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()

if INTERPRETED and find_spec("triton"):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        from merit_optim.optim.engines import kernels

    assert type(kernels.moments).__name__ == "InterpretedFunction", (
        "the kernels were imported before TRITON_INTERPRET=1 was set: give pytest the tests before src"
    )


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``fused=True`` be had for tensors on the CPU."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that asks for it runs once for each device."""
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("the kernels are compiled for the GPU here: run these with -m gpu")
    return torch.device(request.param)
