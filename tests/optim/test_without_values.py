"""Steps of tensors without values, by which memory is estimated: on the meta device, or of FakeTensorMode."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import CASES, OWN_CASES, Case, name_of, parameters, params_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from merit_optim import MERIT, MuonMERIT

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_own_case = pytest.mark.parametrize("case", OWN_CASES, ids=name_of)
DEVICES = {"fake": ("cpu", FakeTensorMode), "meta": ("meta", nullcontext)}
NUM_STEPS = 3  # in the third, some of SOAP's bases are improved


def stepped(case: Case, params: list[nn.Parameter], num_steps: int = NUM_STEPS, **options: Any) -> Optimizer:
    optimizer = case.build(params, **options)
    for _ in range(num_steps):
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def blank(device: str = "cpu") -> list[nn.Parameter]:
    """The parameters of the other tests, made on this device."""
    return [nn.Parameter(torch.empty(param.shape, device=device)) for param in parameters()]


def sizes_of_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: (x.shape, x.dtype) for key, x in optimizer.state[param].items()}
        for param in params_of(optimizer)
    ]


@pytest.mark.parametrize("kind", DEVICES)
@every_case
def test_the_state_after_some_steps_is_as_large_as_that_of_real_ones(case: Case, kind: str) -> None:
    device, mode = DEVICES[kind]
    with mode():
        optimizer = stepped(case, blank(device))
        optimizer.load_state_dict(optimizer.state_dict())
    assert sizes_of_state(optimizer) == sizes_of_state(stepped(case, parameters()))
    if kind == "fake":
        assert all(type(x) is FakeTensor for state in optimizer.state.values() for x in state.values())


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "raise", "max_grad_norm": 1.0}, {"nonfinite": "skip", "lr": 0.0}],
    ids=["raise", "skip"],
)
@every_own_case
def test_options_that_read_values_take_the_step(case: Case, options: dict[str, Any], kind: str) -> None:
    device, mode = DEVICES[kind]
    with mode():
        stepped(case, blank(device), 2, **options)


def test_weights_that_are_not_contiguous_have_steps_too() -> None:
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(5, 3, 4).permute(2, 0, 1))
        param.grad = torch.empty_like(param)
        MERIT([param]).step()


def test_the_fused_engine_leaves_them_to_the_eager_one(monkeypatch) -> None:
    """Kernels need addresses, which they do not have."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with FakeTensorMode():
        params = blank()
        optimizer = MERIT(params, fused=True)
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer.step()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("direction", ["muon", "soap"])
@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "skip"])
@pytest.mark.parametrize("placed", ["rows", "rows and columns"])
def test_sharded_weights_have_steps_too(direction: str, nonfinite: Any, placed: str) -> None:
    from torch.distributed.tensor import DTensor, Shard

    meshes = {"rows": (4,), "rows and columns": (2, 2)}
    mesh = dist.init_device_mesh("cpu", meshes[placed])
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    with FakeTensorMode():
        shard = torch.empty(8 // mesh.size(0), 12 // (mesh.size(1) if mesh.ndim > 1 else 1))
        param = nn.Parameter(DTensor.from_local(shard, mesh, placements, run_check=False))
        optimizer = MuonMERIT([{"params": [param], "direction": direction}], nonfinite=nonfinite)
        for _ in range(3):
            param.grad = torch.zeros_like(param)
            optimizer.step()
