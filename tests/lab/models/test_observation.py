"""What attention is said to have done, against logits that are all held at once."""

import math
from dataclasses import replace

import pytest
import torch
from model_cases import FAMILIES, GPT2, sequences, spread

from merit_lab.models import build


def materialised(query, key, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit and mean entropy of each head, in float64 from the whole matrix."""
    time = query.shape[-2]
    logits = query.double() @ key.double().mT * scale
    logits = logits.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -torch.inf)
    weights = logits.softmax(dim=-1)
    return logits.amax(dim=(0, 2, 3)), -torch.special.xlogy(weights, weights).sum(-1).mean(dim=(0, 2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_models_observation_is_that_of_its_logits(family, autocast, monkeypatch) -> None:
    config = FAMILIES[family]
    model = spread(config)
    seen = []

    def remember(query, key, value, **options):
        seen.append(materialised(query.detach(), key.detach(), 1 / math.sqrt(config.head_width)))
        return original(query, key, value, **options)

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", remember)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model(*sequences(config), observe=True).attention
    assert found.max_logits.shape == found.entropy.shape == (config.layers, config.heads)
    assert found.max_logits.dtype == found.entropy.dtype == torch.float32
    torch.testing.assert_close(
        found.max_logits, torch.stack([m for m, _ in seen]).float(), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(found.entropy, torch.stack([e for _, e in seen]).float(), rtol=1e-4, atol=1e-5)
    assert found.max_logits.min() > 0.5  # attention is far from uniform, and no two heads alike
    assert found.max_logits.unique().numel() == config.layers * config.heads


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_observing_changes_neither_the_loss_nor_its_gradients(attention) -> None:
    results, observed = [], []
    for observe in (False, "max", True):
        model = spread(replace(GPT2, attention=attention))
        output = model(*sequences(GPT2), observe=observe)
        results.append([output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))])
        observed.append(output.attention)
    for others in zip(*results, strict=True):
        assert torch.equal(others[0], others[1])
        assert torch.equal(others[0], others[2])
    nothing, logits_alone, everything = observed
    assert nothing is logits_alone.entropy is None
    assert torch.equal(logits_alone.max_logits, everything.max_logits)
    assert not everything.max_logits.requires_grad


def test_qk_norm_bounds_the_logits() -> None:
    """Of normalised queries and keys with scales of 1 no logit exceeds the square root of the width."""
    model = build(FAMILIES["gpt2-qk-norm"])
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query_key_value.weight.mul_(1000)
    found = model(*sequences(GPT2), observe="max").attention.max_logits
    assert 0.5 * math.sqrt(GPT2.head_width) < found.max() <= math.sqrt(GPT2.head_width) * (1 + 1e-5)
