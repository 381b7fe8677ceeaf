"""FSDP2 on a GPU: a step of the fused engine on sharded parameters gives the bits of the plain step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from merit_optim import LAMB, MERIT, MaxLAMB

pytestmark = pytest.mark.gpu


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(1000, 96), nn.Linear(96, 257), nn.GELU(), nn.Linear(257, 96), nn.LayerNorm(96)]
    return nn.Sequential(*layers).to("cuda", dtype)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}], ids=repr)
@pytest.mark.parametrize("build", [MERIT, MaxLAMB, LAMB])
def test_fsdp2_on_one_gpu_gives_the_bits_of_the_plain_step(build, options, dtype) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    plain, sharded = network(dtype), network(dtype)
    for layer in sharded:
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(sharded)
    optimizers = [build(model.parameters(), fused=True, **options) for model in (plain, sharded)]
    for step in range(6):
        tokens = torch.randint(1000, (4, 32), generator=torch.Generator().manual_seed(step)).cuda()
        for model, optimizer in zip((plain, sharded), optimizers, strict=True):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), reference in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert torch.equal(param.full_tensor(), reference), name
        for key, value in optimizers[0].state[reference].items():
            state = optimizers[1].state[param][key]
            assert torch.equal(state.full_tensor() if isinstance(state, DTensor) else state, value), key
