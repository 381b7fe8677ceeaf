"""What callbacks observe of a step, whatever became of the one before."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from merit_optim.integrations.step_watch import StepWatch
from merit_optim.monitor import AttentionMonitor


def test_a_step_that_was_given_up_is_not_in_the_next_reading() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters())
    inputs = torch.randn(2, 4, 16)

    def largest_logit(watch: StepWatch) -> float:
        watch.begin(layer, [optimizer])
        layer(inputs)
        return watch.end()["attention/max_logit"]

    alone = largest_logit(StepWatch(details=False, entropy=False))
    watch = StepWatch(details=False, entropy=False)
    for _ in range(2):  # given up when told so, and when the next one begins
        watch.begin(layer, [optimizer])
        layer(100 * inputs)
        assert largest_logit(watch) == alone
        watch.begin(layer, [optimizer])
        layer(100 * inputs)
        watch.abandon()


def test_attention_is_read_of_all_ranks_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True)
    groups = []
    read = AttentionMonitor.read

    def remembered(monitor: AttentionMonitor, group: dist.ProcessGroup | None = None):
        groups.append(group)
        return read(monitor, group)

    def observe() -> None:
        watch = StepWatch(details=False, entropy=False)
        watch.begin(layer, [])
        layer(torch.randn(2, 4, 16))
        assert "attention/max_logit" in watch.end()

    monkeypatch.setattr(AttentionMonitor, "read", remembered)
    observe()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        observe()
        assert groups == [None, dist.group.WORLD]
    finally:
        dist.destroy_process_group()
