"""The weights of the benchmarks' models: their shapes and kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from merit_optim.optim.kinds import Kind

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]


class WeightSpec(NamedTuple):
    """A weight's shape, and the kind that ``kinds_of`` would find in a model."""

    shape: Shape
    kind: Kind

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def gpt2(width: int, depth: int, vocabulary: int = 50304, context: int = 1024) -> list[WeightSpec]:
    """GPT-2 as nanoGPT builds it: no biases, tied embeddings, vocabulary padded to 50304."""
    norm = WeightSpec((width,), "vector")
    attention = [WeightSpec((3 * width, width), "hidden"), WeightSpec((width, width), "hidden")]
    mlp = [WeightSpec((4 * width, width), "hidden"), WeightSpec((width, 4 * width), "hidden")]
    tables = [WeightSpec((vocabulary, width), "embedding"), WeightSpec((context, width), "embedding")]
    return [*tables, *([norm, *attention, norm, *mlp] * depth), norm]


def llama(width: int, hidden: int, depth: int, vocabulary: int = 32000) -> list[WeightSpec]:
    """Llama with full multi-head attention: no biases, untied embeddings."""
    norm = WeightSpec((width,), "vector")
    attention = [WeightSpec((width, width), "hidden")] * 4
    mlp = [WeightSpec((hidden, width), "hidden")] * 2 + [WeightSpec((width, hidden), "hidden")]
    embedding, head = WeightSpec((vocabulary, width), "embedding"), WeightSpec((vocabulary, width), "head")
    return [embedding, *([*attention, *mlp, norm, norm] * depth), norm, head]


WEIGHTS: dict[str, list[WeightSpec]] = {
    "tiny": gpt2(128, 4, vocabulary=1024, context=256),
    "gpt2-embedding": [WeightSpec((50304, 768), "embedding")],
    "gpt2-small": gpt2(768, 12),
    "gpt2-medium": gpt2(1024, 24),
    "gpt2-large": gpt2(1280, 36),
    "llama-7b": llama(4096, 11008, 32),
}

MODELS: dict[str, list[Shape]] = {
    name: [weight.shape for weight in weights] for name, weights in WEIGHTS.items()
}
"""The shapes without the kinds."""


def num_elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def make_parameters(shapes: list[Shape], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights at the scale of an initialisation, with random gradients."""
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
    def of(cls, weights: list[WeightSpec], device: torch.device) -> Parameters:
        return cls(
            make_parameters([weight.shape for weight in weights], device), [weight.kind for weight in weights]
        )

    @property
    def hidden(self) -> Tensors:
        """The hidden matrices."""
        return [param for param, kind in zip(self.all, self.kinds, strict=True) if kind == "hidden"]

    @property
    def rest(self) -> Tensors:
        return [param for param, kind in zip(self.all, self.kinds, strict=True) if kind != "hidden"]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups in the form of ``param_groups``, for optimizers that need the kinds."""
        return [{"params": self.all, "param_kinds": self.kinds}]
