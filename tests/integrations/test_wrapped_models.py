"""What each weight is does not depend on what a training library made of its model."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from merit_optim import MuonMERIT, param_groups

HIDDEN = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}


class Model(nn.Module):
    """As wide as it has tokens: by its shape, every matrix could be a head or an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=16) for _ in range(2)
        )
        self.head = nn.Linear(16, 16, bias=False)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def sharded(model: Model) -> Model:
    mesh = dist.init_device_mesh("cpu", (1,))
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    return model


def checkpointed(model: Model) -> Model:
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    return model


def directions(model: nn.Module) -> dict[str, str]:
    """By the names that the weights had before."""
    groups = MuonMERIT(param_groups(model)).param_groups
    return {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): group["direction"]
        for group in groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize(
    "wrap",
    [
        sharded,
        lambda model: sharded(checkpointed(model)),
        lambda model: compiled(sharded(model)),
        DistributedDataParallel,
        lambda model: DistributedDataParallel(compiled(model)),
        lambda model: compiled(DistributedDataParallel(model)),
    ],
    ids=["FSDP2", "FSDP2 and checkpointing", "FSDP2, compiled", "DDP", "compiled, DDP", "DDP, compiled"],
)
def test_directions_are_those_of_the_model_itself(wrap: Callable[[nn.Module], nn.Module]) -> None:
    expected = directions(Model())
    hidden = {name for name, direction in expected.items() if direction == "muon"}
    assert hidden == {f"blocks.{i}.{name}" for i in range(2) for name in HIDDEN}
    assert directions(wrap(Model())) == expected
