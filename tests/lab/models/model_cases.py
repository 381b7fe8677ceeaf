"""Small models of both families, shared by the tests."""

from dataclasses import replace

import torch

from merit_lab.models import LanguageModel, ModelConfig, build

GPT2 = ModelConfig(width=48, heads=3, layers=2, context=24, vocab_size=101)
LLAMA = replace(GPT2, family="llama")
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gpt2-qk-norm": replace(GPT2, qk_norm=True),
    "llama-qk-norm": replace(LLAMA, qk_norm=True),
}


def spread(config: ModelConfig, scale: float = 0.3) -> LanguageModel:
    """A model with weights so large that attention is far from uniform, and no scale is 1."""
    torch.manual_seed(1)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


def sequences(config: ModelConfig, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets."""
    drawn = torch.randint(
        config.vocab_size, (batch, config.context + 1), generator=torch.Generator().manual_seed(2)
    )
    return drawn[:, :-1], drawn[:, 1:]
