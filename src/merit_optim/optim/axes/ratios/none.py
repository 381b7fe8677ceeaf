"""No ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_optim.optim.axes.ratios.ratio import Norm, Ratio
from merit_optim.optim.axes.registered import register


@register("none")
@dataclass(frozen=True, kw_only=True)
class Unscaled(Ratio):
    """s = 1: with Adam's direction AdamW, with Muon's Muon. There is nothing to measure or to bound."""

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        return ("clip",)

    @property
    def measures(self) -> Norm | None:
        return None

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return torch.ones_like(whole)

    def bounded(self, scale: Tensor) -> Tensor:
        return scale
