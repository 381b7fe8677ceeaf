"""Configurations: presets, counts, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from merit_lab.models import PRESETS, ModelConfig, build, flops_per_token, num_parameters

SMALL = ModelConfig(width=48, heads=3, layers=2, context=32, vocab_size=96)
VARIANTS = [
    SMALL,
    replace(SMALL, tied=False, hidden=100, qk_norm=True),
    replace(SMALL, family="llama"),
    replace(SMALL, family="llama", tied=True, hidden=100, qk_norm=True),
]


@pytest.mark.parametrize("config", [*PRESETS.values(), *VARIANTS], ids=lambda c: f"{c.family}-{c.width}")
def test_num_parameters_is_that_of_the_built_model(config) -> None:
    with torch.device("meta"):
        model = build(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("config", VARIANTS, ids=lambda c: f"{c.family}-{c.qk_norm}")
def test_flops_are_those_of_the_operations(config) -> None:
    """Norms and scales, which torch does not count, are all that may differ."""
    model = build(replace(config, attention="math"))
    tokens = torch.zeros(3, config.context, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).loss.backward()
    assert flops_per_token(config) == pytest.approx(counter.get_total_flops() / tokens.numel(), rel=0.02)


@pytest.mark.parametrize(("num_tokens", "padded"), [(1, 64), (256, 256), (257, 320), (50257, 50304)])
def test_a_vocabulary_is_padded_to_a_multiple_of_64(num_tokens, padded) -> None:
    assert SMALL.with_vocab(num_tokens) == replace(SMALL, vocab_size=padded)


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"attention": "math"}, 0),
        ({"vocab_size": 50304}, 8192),
        ({"vocab_size": 2**30}, 1),
        ({"loss_chunk": 5}, 5),
    ],
)
def test_the_loss_holds_a_gigabyte_of_logits_unless_told_otherwise(changes, chunk) -> None:
    assert replace(SMALL, **changes).tokens_per_loss_chunk == chunk


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 50}, "width 50 is not a multiple of heads 3; .* width 51"),
        ({"family": "llama", "width": 45}, "heads of 15; .* even width"),
        ({"family": "lama"}, "family is 'lama'; did you mean 'llama'"),
        (
            {"attention": "flash"},
            "attention is 'flash'; it must be one of auto, sdpa, cudnn, flex, math",
        ),
        ({"layers": 0}, "layers is 0; it must be a whole number of at least 1"),
        ({"hidden": -1}, "hidden is -1"),
        ({"norm_eps": math.inf}, r"norm_eps is inf; it must be above 0 and finite"),
        ({"rope_base": 500.0}, "but family is 'gpt2', which has learned positions; leave it out"),
        ({"attention": "math", "loss_chunk": 4}, "loss_chunk is 4 and attention is 'math'"),
        ({"attention": "flex", "heads": 6}, "heads of width 8 are too small .* at least 16"),
    ],
)
def test_a_config_that_means_nothing_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)
