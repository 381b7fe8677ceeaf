"""MERIT's ratios: for each element the largest of those of its row, its column and the whole weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.ratios.ratio import Norm, Ratio, Sizes, broadcasting
from merit_optim.optim.axes.registered import register


@register("merit")
@dataclass(frozen=True, kw_only=True)
class Merit(Ratio):
    """The paper's ratios, and as options its ablations.

    b  = |w| / |u|                        over the whole weight
    r_i = |w_i.| / |u_i.|  per row        c_j = |w_.j| / |u_.j|  per column
    s_ij = max(r_i, c_j, b)
    """

    clip: float | None = 1.0
    norm: Norm = "max"
    element_wise: bool = True
    """False: s = b."""
    weight_bound: bool = True
    """False: s = max(r, c)."""

    def check(self) -> None:
        super().check()
        validate.flag("element_wise", self.element_wise)
        validate.flag("weight_bound", self.weight_bound)

    @property
    def lines(self) -> tuple[str, ...]:
        return ("rows", "columns") if self.element_wise else ()

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        if row is None or column is None:
            return whole
        # The bound on the smaller of the two: it is read once for each row, not for each element.
        row = torch.maximum(row, whole) if self.weight_bound else row
        return torch.maximum(row, column)

    def is_bound(self, ratios: Sizes, scale: Tensor) -> Tensor | None:
        row, column, whole = broadcasting(ratios)
        if row is None or column is None or not self.weight_bound:
            return None
        return (torch.maximum(row, column) < whole) & (scale == whole)
