"""The parameter shapes of the models that the benchmarks step."""

from __future__ import annotations

import torch

Shape = tuple[int, ...]


def gpt2(width: int, depth: int, vocabulary: int = 50304, context: int = 1024) -> list[Shape]:
    """GPT-2 as nanoGPT builds it: no biases, tied embeddings, vocabulary padded to 50304."""
    block: list[Shape] = [
        (width,),
        (3 * width, width),
        (width, width),
        (width,),
        (4 * width, width),
        (width, 4 * width),
    ]
    return [(vocabulary, width), (context, width), *(block * depth), (width,)]


def llama(width: int, hidden: int, depth: int, vocabulary: int = 32000) -> list[Shape]:
    """Llama with full multi-head attention: no biases, untied embeddings."""
    attention: list[Shape] = [(width, width)] * 4
    mlp: list[Shape] = [(hidden, width), (hidden, width), (width, hidden)]
    return [
        (vocabulary, width),
        *([*attention, *mlp, (width,), (width,)] * depth),
        (width,),
        (vocabulary, width),
    ]


MODELS: dict[str, list[Shape]] = {
    "tiny": gpt2(128, 4, vocabulary=1024, context=256),
    "gpt2-embedding": [(50304, 768)],
    "gpt2-small": gpt2(768, 12),
    "gpt2-medium": gpt2(1024, 24),
    "gpt2-large": gpt2(1280, 36),
    "llama-7b": llama(4096, 11008, 32),
}


def num_elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def make_parameters(
    shapes: list[Shape], device: torch.device, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Random weights of the size that initialisation gives them, with random gradients."""
    params = []
    for shape in shapes:
        param = (torch.randn(shape, device=device) * 0.02).to(dtype).requires_grad_()
        param.grad = (torch.randn(shape, device=device) * 1e-3).to(dtype)
        params.append(param)
    return params
