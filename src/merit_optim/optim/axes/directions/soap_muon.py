"""SOAP's direction, orthogonalised: what SOAP's bases and second moments whiten, Newton-Schulz completes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.muon import PRODUCT_DTYPES, SCALES, ProductDtype, Scale, polar_scale
from merit_optim.optim.axes.directions.newton_schulz import (
    COEFFICIENTS,
    NSCoefficients,
    coefficients_of,
    num_products,
    polar,
)
from merit_optim.optim.axes.directions.soap import Soap
from merit_optim.optim.axes.registered import register


@register("soap-muon")
@dataclass(frozen=True, kw_only=True)
class SoapMuon(Soap):
    """d = scale * polar(SOAP's d).  State and schedule of the bases are SOAP's.

    On every matrix, it needs the fewest steps in the public record of modded-nanogpt's optimization track.
    """

    ns_steps: int = 5
    ns_coefficients: NSCoefficients = "quintic"
    ns_dtype: ProductDtype = "bfloat16"
    scale: Scale = "rms"
    transposed: bool = False

    def check(self) -> None:
        super().check()
        validate.count("ns_steps", self.ns_steps)
        validate.coefficients("ns_coefficients", self.ns_coefficients, COEFFICIENTS)
        validate.one_of("ns_dtype", self.ns_dtype, PRODUCT_DTYPES)
        validate.one_of("scale", self.scale, SCALES)

    def whole(self, gathered: tuple[Tensor, ...], step: float | Tensor) -> tuple[Tensor | None, ...]:
        d_NRC, *state = super().whole(gathered, step)
        if d_NRC is None:
            return None, *state
        dtype = d_NRC.dtype if self.ns_dtype == "float32" else getattr(torch, self.ns_dtype)
        x_NRC = polar(d_NRC, coefficients_of(self.ns_coefficients), self.ns_steps, dtype, eps=1e-7)
        rows, columns = d_NRC.shape[1:]
        scale = polar_scale(self.scale, *((columns, rows) if self.transposed else (rows, columns)))
        return x_NRC.to(d_NRC.dtype) * scale, *state

    def num_operations(self, rows: int, columns: int) -> int:
        return super().num_operations(rows, columns) + num_products(rows, columns, self.ns_steps)
