"""The weights of the benchmarks' models, and lower bounds on the time of a step over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from merit_lab.models import PRESETS, ModelConfig, build
from merit_optim.optim.axes.directions import Muon
from merit_optim.optim.groups import divided
from merit_optim.optim.kinds import Kind, kinds_of

Shape = tuple[int, ...]
Tensors = list[torch.Tensor]


class WeightSpec(NamedTuple):
    """A weight's shape, and the kind that ``kinds_of`` would find in a model."""

    shape: Shape
    kind: Kind

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def _weights(config: ModelConfig) -> list[WeightSpec]:
    """The weights of a model of the lab."""
    with torch.device("meta"):
        model = build(config)
    kinds = kinds_of(model)
    return [WeightSpec(tuple(weight.shape), kinds[weight]) for weight in model.parameters()]


_TINY = ModelConfig(width=128, heads=4, layers=4, vocab_size=1024, context=256)
_LLAMA_7B = ModelConfig(
    family="llama", width=4096, heads=32, layers=32, hidden=11008, vocab_size=32000, context=2048
)
WEIGHTS: dict[str, list[WeightSpec]] = {
    "tiny": _weights(_TINY),
    "gpt2-embedding": [WeightSpec((50304, 768), "embedding")],
    **{name: _weights(PRESETS[name]) for name in ("gpt2-small", "gpt2-medium", "gpt2-large")},
    "llama-7b": _weights(_LLAMA_7B),
}


@dataclass(frozen=True)
class Parameters:
    """A model's parameters, each with its kind."""

    all: Tensors
    kinds: list[Kind]

    @classmethod
    def of(cls, weights: list[WeightSpec], device: torch.device) -> Parameters:
        """Random weights at the scale of an initialisation, with random gradients."""
        params = []
        for weight in weights:
            params.append((torch.randn(weight.shape, device=device) * 0.02).requires_grad_())
            params[-1].grad = torch.randn(weight.shape, device=device) * 1e-3
        return cls(params, [weight.kind for weight in weights])

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
        kinds = {param: {"kind": kind} for param, kind in zip(self.all, self.kinds, strict=True)}
        return divided({"params": self.all}, kinds)


class Floor(NamedTuple):
    """The bytes and operations that a step needs at least.

    Weights and state are read and written once, gradients read once; all are float32. For Muon,
    Newton-Schulz comes on top: each pass over an m x n matrix with m <= n has X X' and B X, with 2 m^2 n
    operations each, and A A, with 2 m^3. Whole products are counted, though A and B are symmetric and half of
    each would do.
    """

    what: str
    num_bytes: int
    num_flops: int = 0

    def milliseconds(self, copy_tb_s: float, matrix_tflop_s: float) -> float:
        """The bytes at the speed of a copy, plus the products at the speed of a large one."""
        return self.num_bytes / copy_tb_s / 1e9 + self.num_flops / matrix_tflop_s / 1e9


def floors_of(weights: list[WeightSpec]) -> list[Floor]:
    """The floors of a model's step: AdamW's, MERIT's, and Muon's if it has hidden matrices."""
    total = sum(weight.num_elements for weight in weights)
    hidden = [weight for weight in weights if weight.kind == "hidden"]
    floors = [
        # Of each element w, m and v are read and written, and g is read.
        Floor("28 bytes: AdamW's traffic", 28 * total),
        # The norms of rows and columns come first, so w, m and v are read twice.
        Floor("40 bytes: MERIT's in two passes", 40 * total),
    ]
    if hidden:
        num_hidden = sum(weight.num_elements for weight in hidden)
        num_flops = sum(Muon().num_operations(*weight.shape) for weight in hidden)
        # Of a hidden matrix w and the momentum are read and written, and g is read.
        num_bytes = 20 * num_hidden + 28 * (total - num_hidden)
        floors.append(Floor("Muon's traffic and products", num_bytes, num_flops))
    return floors
