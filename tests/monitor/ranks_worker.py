"""Run by forked_ranks.py: two ranks together observe what one would."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from merit_optim.monitor import AttentionMonitor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = 3 * torch.randn(4 * size, 6, 16, generator=torch.Generator().manual_seed(1))
    alone = AttentionMonitor(Model())
    with alone:
        alone.model(x)
    expected = alone.read()

    replicated, sharded = Model(), Model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    for model, run in ((replicated, nn.parallel.DistributedDataParallel(replicated)), (sharded, sharded)):
        monitor = AttentionMonitor(model)
        with monitor:
            run(x[4 * rank : 4 * rank + 4]).sum().backward()
        reading = monitor.read(group=dist.group.WORLD)
        assert list(reading.max_logits) == ["layers.0.self_attn", "layers.1.self_attn"]
        torch.testing.assert_close(reading.max_logits, expected.max_logits)
        torch.testing.assert_close(reading.entropy, expected.entropy)

    with monitor:
        y = x[4 * rank : 4 * rank + 4]
        sharded(y * torch.nan if rank == 1 else y)
    reading = monitor.read(group=dist.group.WORLD)
    assert all(heads.isnan().all() for heads in reading.max_logits.values())  # one rank's NaN is everybody's

    different_layers(x, rank)
    dist.destroy_process_group()


def different_layers(x, rank) -> None:
    """As with LayerDrop: each rank observes another layer, and then one of them none."""
    model = Model()
    monitor, expected = AttentionMonitor(model), {}
    for alone in (AttentionMonitor(layer) for layer in model.layers):
        with alone:
            alone.model(x)
        expected[len(expected)] = alone.read().max_logits["self_attn"]
    with monitor:
        model.layers[rank](x)
    reading = monitor.read(group=dist.group.WORLD)
    assert {name: heads.tolist() for name, heads in reading.max_logits.items()} == {
        f"layers.{number}.self_attn": heads.tolist() for number, heads in expected.items()
    }
    assert reading.entropy.keys() == reading.max_logits.keys()
    with monitor:
        if rank == 1:
            model.layers[0](x)
    reading = monitor.read(group=dist.group.WORLD)
    assert reading.max_logits["layers.0.self_attn"].tolist() == expected[0].tolist()
    assert monitor.read(group=dist.group.WORLD) is None  # no step since
