"""Muon's direction: the polar factor of the momentum, which moves all of its directions equally far.

    M <- momentum*M + (1-momentum)*g
    N  = momentum*M + (1-momentum)*g with Nesterov, else M
    d  = scale * polar(N)

The scale sqrt(max(rows, columns)) gives d a root mean square of about 1, as Adam's direction has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.directions.direction import Direction
from merit_optim.optim.directions.newton_schulz import COEFFICIENTS, coefficients_of, polar
from merit_optim.optim.matrices import Matrices, View

ProductDtype = Literal["bfloat16", "float16", "float32"]
PRODUCT_DTYPES: tuple[ProductDtype, ...] = ("bfloat16", "float16", "float32")

Scale = Literal["rms", "match_rms_adamw", "original", "spectral"]
SCALES: tuple[Scale, ...] = ("rms", "match_rms_adamw", "original", "spectral")

# Keeps a row of zeros zero, and the norm of nothing from being divided by. NorMuon's authors' own.
_NEURON_EPS = 1e-10


def scale_of(scale: Scale, rows: int, columns: int) -> float:
    """What the polar factor is multiplied by; its own root mean square is 1 / sqrt(max(rows, columns))."""
    match scale:
        case "rms":
            return math.sqrt(max(rows, columns))
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        case "original":
            return math.sqrt(max(1, rows / columns))
        case "spectral":
            return 1.0


@dataclass(frozen=True, kw_only=True)
class Muon(Direction):
    """Muon's direction, and NorMuon's with ``neuron_beta``."""

    NAME: ClassVar[str] = "muon"

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: str | Sequence[float] | Sequence[tuple[float, float, float]] = "quintic"
    ns_dtype: ProductDtype = "bfloat16"
    eps: float = 1e-7
    scale: Scale = "rms"
    neuron_beta: float | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        # torch.optim.Muon's key, and NorMuon's.
        return (
            ("momentum_buffer",)
            if self.neuron_beta is None
            else ("momentum_buffer", "second_momentum_buffer")
        )

    def check(self) -> None:
        validate.fraction("momentum", self.momentum)
        validate.flag("nesterov", self.nesterov)
        validate.count("ns_steps", self.ns_steps)
        validate.coefficients("ns_coefficients", self.ns_coefficients, COEFFICIENTS)
        validate.one_of("ns_dtype", self.ns_dtype, PRODUCT_DTYPES)
        validate.epsilon(self.eps, "1e-7")
        validate.one_of("scale", self.scale, SCALES)
        if self.neuron_beta is not None:
            validate.fraction("neuron_beta", self.neuron_beta, ", or None")

    def refusal(self, view: View, matrices: Matrices) -> str | None:
        if matrices.is_vector:
            return (
                f"direction='muon' orthogonalises matrices, and with matrix_dims={view.matrix_dims} it is a "
                "vector: give it direction='adam'"
            )
        if self.neuron_beta is not None and view.split is not None and view.split_dim == 1:
            return "neuron_beta has an average for each row, and split_dim=1 cuts the rows: use split=None"
        return None

    def shapes(self, matrices: Matrices) -> tuple[tuple[int, ...] | None, ...]:
        return (None, (matrices.num, matrices.rows, 1))[: len(self.keys)]

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        del step
        dtype, (momentum_buffer, *neurons) = grad_NRC.dtype, state
        averaged = torch.lerp(momentum_buffer.to(dtype), grad_NRC, 1 - self.momentum).to(
            momentum_buffer.dtype
        )
        n_NRC = averaged.to(dtype)
        if self.nesterov:
            n_NRC = torch.lerp(grad_NRC, n_NRC, self.momentum)
        # float64 weights keep their precision.
        products = dtype if self.ns_dtype == "float32" else getattr(torch, self.ns_dtype)
        coefficients = coefficients_of(self.ns_coefficients)
        d_NRC = polar(n_NRC, coefficients, self.ns_steps, products, self.eps)
        if self.neuron_beta is not None:
            d_NRC, normalizers = _normalized(d_NRC, neurons[0], self.neuron_beta)
            neurons = [normalizers]
        return d_NRC * scale_of(self.scale, *d_NRC.shape[1:]), (averaged, *neurons)


def _normalized(d_NRC: Tensor, average_NR1: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """NorMuon: every row brought to the same average size, and the whole kept as large as it was."""
    size_N11 = torch.linalg.vector_norm(d_NRC, dim=(1, 2), keepdim=True)
    mean_sq_NR1 = d_NRC.square().mean(2, keepdim=True)
    stored = torch.lerp(average_NR1.to(d_NRC.dtype), mean_sq_NR1, 1 - beta).to(average_NR1.dtype)
    normalized = d_NRC / (stored.to(d_NRC.dtype).sqrt() + _NEURON_EPS)
    new_size_N11 = torch.linalg.vector_norm(normalized, dim=(1, 2), keepdim=True)
    return normalized * (size_N11 / (new_size_N11 + _NEURON_EPS)), stored
