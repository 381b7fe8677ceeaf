"""What only a GPU has: flex_attention's own largest logits, and graphs that are replayed."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from merit_optim.monitor import AttentionMonitor

pytestmark = pytest.mark.gpu


def causal(_batch, _head, query, key):
    return query >= key


class Model(nn.Module):
    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.project = nn.Linear(64, 192)

    def heads(self, x):
        return (3 * y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.project(x).chunk(3, dim=-1))

    def forward(self, x, mask):
        query, key, value = self.heads(x)
        if self.kernel == "flex":
            return flex_attention(query, key, value, block_mask=mask)
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("kernel", ["flex", "sdpa"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_training_step(kernel, mode) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(kernel).cuda()
    run = torch.compile(model, mode=mode, fullgraph=True)
    mask = create_block_mask(causal, None, None, 256, 256, device="cuda")
    monitor = AttentionMonitor(run)
    for step in range(4):
        x = torch.randn(2, 256, 64, device="cuda")
        model.zero_grad()  # a gradient that a graph wrote is overwritten when the graph is replayed
        with monitor:
            run(x, mask).float().square().mean().backward()
        query, key, _ = model.heads(x)
        hidden = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
        logits = (query @ key.mT / math.sqrt(16)).masked_fill(hidden, -torch.inf)
        expected = {"Model": logits.amax(dim=(0, 2, 3)).detach().cpu()}
        reading = monitor.read()
        torch.testing.assert_close(reading.max_logits, expected, rtol=5e-3, atol=5e-3, msg=f"step {step}")
        assert list(reading.entropy) == ([] if kernel == "flex" else ["Model"])
