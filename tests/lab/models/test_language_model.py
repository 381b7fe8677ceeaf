"""The model itself: its equations, initialisation, gradients and refusals."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_cases import FAMILIES, GPT2, LLAMA, sequences, spread

from merit_lab.models import ModelConfig, build


@pytest.fixture(params=FAMILIES)
def config(request) -> ModelConfig:
    return FAMILIES[request.param]


def test_the_loss_is_the_cross_entropy_of_the_logits(config) -> None:
    model = spread(config)
    tokens, targets = sequences(config)
    output = model(tokens)
    assert output.loss is None
    assert output.attention is None
    expected = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    for loss_chunk in (0, 7, 8192):
        model.config = replace(config, loss_chunk=loss_chunk)
        found = model(tokens, targets)
        assert found.logits is None
        torch.testing.assert_close(found.loss, expected)


def test_a_token_sees_no_later_one(config) -> None:
    model = spread(config)
    tokens, _ = sequences(config)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % config.vocab_size
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(after[:, :10], before[:, :10])
    assert (after[:, 10:] - before[:, 10:]).abs().amax(dim=(0, 2)).min() > 1e-2


def test_rotary_logits_depend_on_distance_alone() -> None:
    """The same tokens further on give the same logits, since nothing else tells positions apart."""
    model = spread(LLAMA)
    tokens, _ = sequences(LLAMA)
    repeated = tokens[:, :1].repeat(1, LLAMA.context)
    torch.testing.assert_close(model(repeated).logits[:, -1], model(tokens[:, :1]).logits[:, 0])


def test_kinds_of_attention_agree(config) -> None:
    """math against sdpa: loss and every gradient."""
    results = []
    for attention in ("sdpa", "math"):
        model = spread(replace(config, attention=attention))
        loss = model(*sequences(config)).loss
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    (loss, gradients), (expected_loss, expected_gradients) = results
    torch.testing.assert_close(loss, expected_loss)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_finite_differences(config) -> None:
    model = spread(replace(config, loss_chunk=17)).double()
    tokens, targets = sequences(config)
    model(tokens, targets).loss.backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                losses.append(model(tokens, targets).loss)
                parameter.sub_(direction, alpha=step)
        numeric = (losses[0] - losses[1]) / 2e-5
        torch.testing.assert_close(
            (parameter.grad * direction).sum(), numeric, rtol=1e-5, atol=1e-8, msg=name
        )


def test_second_derivatives_with_math_attention(config) -> None:
    """A Hessian product by double backward against the difference of two gradients."""
    model = spread(replace(config, attention="math")).double()
    parameters = list(model.parameters())
    directions = [torch.randn_like(p) for p in parameters]

    def gradients(*, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
        loss = model(*sequences(config)).loss
        return torch.autograd.grad(loss, parameters, create_graph=create_graph)

    slope = sum((g * d).sum() for g, d in zip(gradients(create_graph=True), directions, strict=True))
    products = torch.autograd.grad(slope, parameters)
    moved = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            torch._foreach_add_(parameters, directions, alpha=step)
        moved.append(gradients())
        with torch.no_grad():
            torch._foreach_sub_(parameters, directions, alpha=step)
    for product, up, down in zip(products, *moved, strict=True):
        assert (product - (up - down) / 2e-6).norm() < 1e-5 * product.norm()


def test_weights_by_way_of_the_meta_device_are_the_same(config) -> None:
    torch.manual_seed(5)
    direct = build(config).state_dict()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = build(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights()
    found = model.state_dict()
    assert found.keys() == direct.keys()
    assert all(torch.equal(found[name], direct[name]) for name in direct)
    assert not list(model.buffers())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_have_their_standard_deviations(family) -> None:
    config = ModelConfig(family=family, width=96, heads=3, layers=8, context=64, vocab_size=512, qk_norm=True)
    for name, parameter in build(config).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        writes_residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if writes_residual else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        assert parameter.mean().item() == pytest.approx(0, abs=0.001), name


def test_weights_are_stored_as_in_the_familys_checkpoints() -> None:
    """An optimizer's ratios depend on it; see Attention."""
    gpt2 = {name: tuple(p.shape) for name, p in build(GPT2).named_parameters()}
    assert gpt2["blocks.0.attention.query_key_value.weight"] == (3 * 48, 48)
    assert "head.weight" not in gpt2  # tied: one parameter, one name
    llama = {name: tuple(p.shape) for name, p in build(LLAMA).named_parameters()}
    assert llama["blocks.0.attention.key.weight"] == (48, 48)
    assert llama["head.weight"] == (101, 48)
    assert not any(name.endswith("bias") for name in [*gpt2, *llama])


@pytest.mark.parametrize(("float32_residual", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_the_residual_stream_has_autocasts_dtype_unless_told_otherwise(
    float32_residual, dtype, config
) -> None:
    model = spread(replace(config, float32_residual=float32_residual), scale=0.05)
    seen = []
    model.blocks[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].dtype))
    tokens, targets = sequences(config)
    exact = model(tokens, targets).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets).loss
        logits = model(tokens).logits
    loss.backward()
    assert seen == [torch.float32, dtype, dtype]
    assert loss.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(loss, exact, rtol=0.01, atol=0)


def test_what_a_model_would_take_without_a_word_is_refused() -> None:
    """Llama has a rotation for any position."""
    with pytest.raises(ValueError, match="25 tokens is longer than the model's context of 24"):
        build(LLAMA)(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="attention 'flex' needs CUDA, but the tokens are on cpu"):
        build(replace(GPT2, attention="flex"))(*sequences(GPT2))
