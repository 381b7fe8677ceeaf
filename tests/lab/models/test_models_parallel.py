"""Models under DDP and FSDP2, on one rank in this process; several ranks are the trainer's tests."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from model_cases import FAMILIES, sequences, spread
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model, **options):
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard])
def test_loss_gradients_and_observation_are_those_of_the_bare_model(family, wrap) -> None:
    config = replace(FAMILIES[family], loss_chunk=50)
    expected_model = spread(config)
    expected = expected_model(*sequences(config), observe=True)
    expected.loss.backward()
    model = wrap(spread(config))
    found = model(*sequences(config), observe=True)
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.attention, expected.attention)
    for a, b in zip(model.parameters(), expected_model.parameters(), strict=True):
        gradient = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
        torch.testing.assert_close(gradient, b.grad)


def test_fsdp2_in_mixed_precision_trains() -> None:
    config = FAMILIES["gpt2"]
    exact = spread(config, scale=0.05)(*sequences(config)).loss
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(spread(config, scale=0.05), mp_policy=policy)
    loss = model(*sequences(config)).loss
    loss.backward()
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
