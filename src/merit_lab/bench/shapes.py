"""The weights of the models that the benchmarks step: their shapes, and what each is in its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from merit_optim.optim.kinds import Kind

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]


class Weight(NamedTuple):
    """A weight's shape, and its kind as ``kinds_of`` would find it in a model."""

    shape: Shape
    kind: Kind

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def gpt2(width: int, depth: int, vocabulary: int = 50304, context: int = 1024) -> list[Weight]:
    """GPT-2 as nanoGPT builds it: no biases, tied embeddings, vocabulary padded to 50304."""
    norm = Weight((width,), "vector")
    attention = [Weight((3 * width, width), "hidden"), Weight((width, width), "hidden")]
    mlp = [Weight((4 * width, width), "hidden"), Weight((width, 4 * width), "hidden")]
    tables = [Weight((vocabulary, width), "embedding"), Weight((context, width), "embedding")]
    return [*tables, *([norm, *attention, norm, *mlp] * depth), norm]


def llama(width: int, hidden: int, depth: int, vocabulary: int = 32000) -> list[Weight]:
    """Llama with full multi-head attention: no biases, untied embeddings."""
    norm = Weight((width,), "vector")
    attention = [Weight((width, width), "hidden")] * 4
    mlp = [Weight((hidden, width), "hidden")] * 2 + [Weight((width, hidden), "hidden")]
    embedding, head = Weight((vocabulary, width), "embedding"), Weight((vocabulary, width), "head")
    return [embedding, *([*attention, *mlp, norm, norm] * depth), norm, head]


WEIGHTS: dict[str, list[Weight]] = {
    "tiny": gpt2(128, 4, vocabulary=1024, context=256),
    "gpt2-embedding": [Weight((50304, 768), "embedding")],
    "gpt2-small": gpt2(768, 12),
    "gpt2-medium": gpt2(1024, 24),
    "gpt2-large": gpt2(1280, 36),
    "llama-7b": llama(4096, 11008, 32),
}

MODELS: dict[str, list[Shape]] = {
    name: [weight.shape for weight in weights] for name, weights in WEIGHTS.items()
}
"""The shapes alone, for what treats all weights alike."""


def num_elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def make_parameters(shapes: list[Shape], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights of the size that initialisation gives them, with random gradients."""
    params = []
    for shape in shapes:
        param = (torch.randn(shape, device=device) * 0.02).to(dtype).requires_grad_()
        param.grad = (torch.randn(shape, device=device) * 1e-3).to(dtype)
        params.append(param)
    return params


@dataclass(frozen=True)
class Parameters:
    """A model's parameters, each with its kind."""

    all: Tensors
    kinds: list[Kind]

    @classmethod
    def of(cls, weights: list[Weight], device: torch.device) -> Parameters:
        return cls(make_parameters([own.shape for own in weights], device), [own.kind for own in weights])

    @property
    def hidden(self) -> Tensors:
        """The hidden matrices."""
        return [own for own, kind in zip(self.all, self.kinds, strict=True) if kind == "hidden"]

    @property
    def rest(self) -> Tensors:
        return [own for own, kind in zip(self.all, self.kinds, strict=True) if kind != "hidden"]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """As ``param_groups`` gives them, for optimizers that sort weights by their kinds."""
        return [{"params": self.all, "param_kinds": self.kinds}]
