"""What attention is said to have done, against logits that are all held at once."""

import math
from dataclasses import replace

import pytest
import torch
from model_cases import FAMILIES, GPT2, sequences, spread
from torch.utils._python_dispatch import TorchDispatchMode

from merit_optim.lab.models import build
from merit_optim.lab.models import observation as observation_module
from merit_optim.lab.models.layers import Attention, rotary_table, rotate
from merit_optim.lab.models.observation import observe_attention


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


def test_the_first_layers_logits_from_the_weights_alone() -> None:
    """Nothing of the forward pass is used here: embedding, norm, projection, rotary, product."""
    config = FAMILIES["llama-qk-norm"]
    model = spread(config)
    tokens, _ = sequences(config)
    block = model.blocks[0]
    assert isinstance(block.attention, Attention)
    x = model.token_embedding.weight[tokens]
    x = x * (x.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * block.attention_norm.weight
    heads = []
    for projection, norm in (
        (block.attention.query, block.attention.query_norm),
        (block.attention.key, block.attention.key_norm),
    ):
        head = (x @ projection.weight.T).view(*tokens.shape, config.heads, config.head_width).transpose(1, 2)
        head = head * (head.square().mean(-1, keepdim=True) + config.norm_eps).rsqrt() * norm.weight
        heads.append(
            rotate(head, rotary_table(config.context, config.head_width, config.rope_base, x.device))
        )
    expected, entropy = materialised(*heads, 1 / math.sqrt(config.head_width))
    found = model(tokens, observe=True).attention
    torch.testing.assert_close(found.max_logits[0], expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy[0], entropy.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("time", [1, 2, 31, 64])
@pytest.mark.parametrize(
    "elements", [1, 2 * 3 * 64 * 5, 2**25], ids=["one-query", "five-queries", "all-queries"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_queries_change_nothing(time, elements, dtype, monkeypatch) -> None:
    monkeypatch.setattr(observation_module, "_BLOCK_ELEMENTS", elements)
    torch.manual_seed(0)
    query, key = (3 * torch.randn(2, 3, time, 16).to(dtype) for _ in range(2))
    found = observe_attention(query, key, 0.25, True)
    expected = torch.stack(materialised(query, key, 0.25)).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(observe_attention(query, key, 0.25, False), expected[:1], rtol=1e-5, atol=1e-5)


def test_no_more_than_a_block_of_logits_is_held(monkeypatch) -> None:
    monkeypatch.setattr(observation_module, "_BLOCK_ELEMENTS", 4096)
    query, key = torch.randn(2, 3, 64, 4), torch.randn(2, 3, 64, 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max(largest, result.numel())
            return result

    with Watch():
        observation_module._observe(query, key, 0.5, True)
    assert 2048 < largest <= 4096


def test_entropy_of_uniform_and_of_one_hot_attention() -> None:
    zeros = torch.zeros(1, 1, 8, 4)
    uniform = sum(math.log(n) for n in range(1, 9)) / 8
    torch.testing.assert_close(observe_attention(zeros, zeros, 1.0, True)[:, 0], torch.tensor([0.0, uniform]))
    peaked = torch.eye(8)[None, None]
    found = observe_attention(1e4 * peaked, peaked, 1.0, True)[:, 0]
    torch.testing.assert_close(found, torch.tensor([1e4, 0.0]))


def test_a_masked_logit_does_not_count() -> None:
    """Only the first query and the last key are large, and no query sees a later key."""
    query, key = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    query[0, 0, 0] = key[0, 0, 3] = 100.0
    assert observe_attention(query, key, 1.0, False).item() == 0.0


def test_a_nan_is_seen() -> None:
    query = torch.zeros(1, 2, 4, 2)
    query[0, 1, 2] = torch.nan
    found = observe_attention(query, torch.ones_like(query), 1.0, True)
    assert found.isnan().tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_observing_changes_neither_the_loss_nor_its_gradients(attention) -> None:
    results = []
    for observe in (False, "max", True):
        model = spread(replace(GPT2, attention=attention))
        output = model(*sequences(GPT2), observe=observe)
        results.append([output.loss, *torch.autograd.grad(output.loss, list(model.parameters()))])
    for others in zip(*results, strict=True):
        assert torch.equal(others[0], others[1])
        assert torch.equal(others[0], others[2])


def test_what_is_observed_follows_what_was_asked() -> None:
    model = build(GPT2)
    tokens, targets = sequences(GPT2)
    assert model(tokens, targets, observe=False).attention is None
    logits_alone = model(tokens, targets, observe="max").attention
    everything = model(tokens, targets, observe=True).attention
    assert logits_alone.entropy is None
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


def test_the_operator_keeps_torchs_rules() -> None:
    """Its fake version, which compilers see, has the real one's shapes."""
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    for entropy in (True, False):
        torch.library.opcheck(observe_attention, (query, key, 0.5, entropy))
