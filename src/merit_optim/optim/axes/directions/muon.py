"""Muon's direction: the polar factor of the momentum, whose singular values are all about 1.

    M <- momentum*M + (1-momentum)*g
    N  = momentum*M + (1-momentum)*g with Nesterov, else M
    d  = scale * polar(N)

The scale sqrt(max(rows, columns)) gives d a root mean square of about 1, as Adam's direction has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.direction import MatrixDirection, Sent, Traffic
from merit_optim.optim.axes.directions.newton_schulz import (
    COEFFICIENTS,
    Coefficients,
    NSCoefficients,
    coefficients_of,
    num_products,
    polar,
)
from merit_optim.optim.axes.registered import register
from merit_optim.optim.axes.sums import sum_in_order
from merit_optim.optim.matrices import Extent, Matrices, View, num_stacking

ProductDtype = Literal["bfloat16", "float16", "float32"]
PRODUCT_DTYPES: tuple[ProductDtype, ...] = ("bfloat16", "float16", "float32")

Scale = Literal["rms", "match_rms_adamw", "original", "spectral"]
SCALES: tuple[Scale, ...] = ("rms", "match_rms_adamw", "original", "spectral")

# Keeps rows of zeros at zero and avoids division by a zero norm. The value of NorMuon's authors.
NEURON_EPS = 1e-10


def polar_scale(scale: Scale, outputs: int, inputs: int) -> float:
    """The scale of the polar factor, whose root mean square is 1 / sqrt(max(outputs, inputs))."""
    match scale:
        case "rms":
            return math.sqrt(max(outputs, inputs))
        case "match_rms_adamw":
            return 0.2 * math.sqrt(max(outputs, inputs))
        case "original":
            return math.sqrt(max(1, outputs / inputs))
        case "spectral":
            return 1.0


@register("muon")
@dataclass(frozen=True, kw_only=True)
class Muon(MatrixDirection):
    """Muon's direction, and NorMuon's with ``neuron_beta``."""

    USES_STEP: ClassVar[bool] = False
    NEEDS_MATRICES: ClassVar[bool] = True
    SCHEDULED: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: NSCoefficients = "quintic"
    ns_dtype: ProductDtype = "bfloat16"
    ns_eps: float = 1e-7
    """The least norm that N is divided by before the passes; torch.optim.Muon calls it eps."""
    scale: Scale = "rms"
    neuron_beta: float | None = None
    transposed: bool = False
    """Whether columns are outputs and rows inputs. The polar factor is the same; the rest is not."""

    @property
    def keys(self) -> tuple[str, ...]:
        # The keys of torch.optim.Muon and of NorMuon.
        return (
            ("momentum_buffer",)
            if self.neuron_beta is None
            else ("momentum_buffer", "second_momentum_buffer")
        )

    @property
    def keys_that_can_begin(self) -> tuple[str, ...]:
        # A common factor of the averages has no effect, so they need not know how many steps came before.
        return self.keys[1:]

    @property
    def coefficients(self) -> Coefficients:
        return coefficients_of(self.ns_coefficients)

    def check(self) -> None:
        validate.fraction("momentum", self.momentum)
        validate.flag("nesterov", self.nesterov)
        validate.count("ns_steps", self.ns_steps)
        validate.coefficients("ns_coefficients", self.ns_coefficients, COEFFICIENTS)
        validate.one_of("ns_dtype", self.ns_dtype, PRODUCT_DTYPES)
        validate.epsilon(self.ns_eps, "1e-7", "ns_eps")
        validate.one_of("scale", self.scale, SCALES)
        if self.neuron_beta is not None:
            validate.fraction("neuron_beta", self.neuron_beta, ", or None")

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        if view.matrices(shape).is_vector:
            return (
                f"direction='muon' orthogonalises matrices, and with matrix_dims={view.matrix_dims} this is "
                "a vector: use direction='adam' for it"
            )
        if self.neuron_beta is not None and view.split is not None and view.split_dim != self.transposed:
            neuron = "column" if self.transposed else "row"
            return (
                f"neuron_beta keeps an average for each {neuron}, and split_dim={view.split_dim} cuts the "
                f"{neuron}s: use neuron_beta=None or split=None"
            )
        num_dims = len(shape) - num_stacking(len(shape), view.matrix_dims)
        if self.transposed and num_dims > 2:
            return (
                f"transposed=True means a matrix (inputs, outputs), and this has {num_dims} dimensions: use "
                "matrix_dims=2 if the others stack matrices, or transposed=False"
            )
        return None

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        neurons = matrices.num, *self._neurons(matrices.rows, matrices.columns)
        return (None, neurons)[: len(self.keys)]

    @property
    def output_dim(self) -> int:
        """The dimension of the outputs in (N, R, C)."""
        return 2 if self.transposed else 1

    def _neurons(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of numbers for each output of a matrix."""
        return (1, columns) if self.transposed else (rows, 1)

    def factor(self, rows: int, columns: int) -> float:
        """The scale of the polar factor of a matrix of this size."""
        return polar_scale(self.scale, *((columns, rows) if self.transposed else (rows, columns)))

    def before(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """N, in the dtype in which it is sent to the owner, and the momentum."""
        dtype, (momentum_buffer, *neurons) = grad_NRC.dtype, state
        averaged = torch.lerp(momentum_buffer.to(dtype), grad_NRC, 1 - self.momentum).to(
            momentum_buffer.dtype
        )
        n_NRC = averaged.to(dtype)
        if self.nesterov:
            n_NRC = torch.lerp(grad_NRC, n_NRC, self.momentum)
        return (n_NRC.to(self._sent_dtype(dtype)),), (averaged, *neurons)

    def whole(self, gathered: tuple[Tensor, ...], step: float | Tensor = 1) -> tuple[Tensor, ...]:
        """The polar factor of N, and what ``after`` needs of it."""
        (n_NRC,) = gathered
        products = self._product_dtype(n_NRC.dtype)
        x_NRC = polar(n_NRC, self.coefficients, self.ns_steps, products, self.ns_eps)
        return (x_NRC,) if self.neuron_beta is None else (x_NRC, mean_squares(x_NRC, self.output_dim))

    def after(
        self,
        formed: tuple[Tensor | None, ...],
        state: tuple[Tensor, ...],
        dtype: torch.dtype,
        extent: Extent,
        step: float | Tensor = 1,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The scaled polar factor; for NorMuon, with normalized outputs."""
        (x_NRC, *of_outputs), (momentum_buffer, *averages) = formed, state
        assert x_NRC is not None
        scale = self.factor(extent.num_rows, extent.num_columns)
        if self.neuron_beta is None:
            return x_NRC.to(dtype) * scale, state
        (mean_sq,), (average,) = of_outputs, averages
        assert mean_sq is not None
        num_inputs = extent.num_rows if self.transposed else extent.num_columns
        factor, average = _equalizing(mean_sq, average, self.neuron_beta, num_inputs)
        factor = factor[:, :, extent.columns] if self.transposed else factor[:, extent.rows]
        # One product, so that a polar factor in bfloat16 needs no copy in dtype.
        return x_NRC * (factor.to(dtype) * scale), (momentum_buffer, average)

    def traffic(self, rows: int, columns: int, dtype: torch.dtype) -> Traffic:
        """N is sent and the polar factor comes back; for NorMuon, also the mean squares of all outputs."""
        sent = self._sent_dtype(dtype)
        products = self._product_dtype(sent)
        neurons = () if self.neuron_beta is None else (Sent(_wide(products), self._neurons(rows, columns)),)
        return Traffic((Sent(sent),), (Sent(products), *neurons))

    def num_operations(self, rows: int, columns: int) -> int:
        """The products of the Newton-Schulz passes."""
        return num_products(rows, columns, self.ns_steps)

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Enough for products in bfloat16. The range of float16 is too small before normalization.
        return torch.bfloat16 if self.ns_dtype == "bfloat16" else dtype

    def _product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the products; "float32" keeps the precision of float64 weights."""
        return dtype if self.ns_dtype == "float32" else getattr(torch, self.ns_dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which squares are summed."""
    return torch.promote_types(dtype, torch.float32)


def mean_squares(x_NRC: Tensor, output_dim: int) -> Tensor:
    """The mean square of each output, as (N, R, 1) or (N, 1, C)."""
    squares_NRC = x_NRC.to(_wide(x_NRC.dtype), copy=True).square_()
    dim = 3 - output_dim
    return sum_in_order(squares_NRC, dim) / squares_NRC.shape[dim]


def _equalizing(mean_sq: Tensor, average: Tensor, beta: float, num_inputs: int) -> tuple[Tensor, Tensor]:
    """NorMuon's factor for each output, which equalizes their average sizes and keeps the norm of the whole.

    The tensors are (N, R, 1), or (N, 1, C) if columns are outputs.
    """
    wide = mean_sq.dtype
    # Each operation is rounded by itself, not as in a lerp, so that all engines get the same averages: a rank
    # without a part of a matrix keeps them too, and uses the eager engine.
    stored = (average.to(wide) * beta + mean_sq * (1 - beta)).to(average.dtype)
    root = stored.to(wide).sqrt() + NEURON_EPS
    dim = 1 if mean_sq.shape[2] == 1 else 2
    size_N11 = (num_inputs * sum_in_order(mean_sq, dim)).sqrt()
    new_size_N11 = (num_inputs * sum_in_order(mean_sq / root.square(), dim)).sqrt()
    return (size_N11 / (new_size_N11 + NEURON_EPS)) / root, stored
