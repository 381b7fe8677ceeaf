"""A floor under the relative size of each row's update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.ratios.ratio import Ratio
from merit_optim.optim.axes.registered import register


@register("floor")
@dataclass(frozen=True, kw_only=True)
class Floor(Ratio):
    """s_i = max(1, floor * |w_i.| / |u_i.|): at a rate of 1, no row moves by a smaller share of its size."""

    floor: float = 0.35

    def check(self) -> None:
        super().check()
        validate.positive("floor", self.floor, "ratio='none' for no floor")

    @property
    def lines(self) -> tuple[str, ...]:
        return ("rows",)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return ((whole if row is None else row) * self.floor).clamp(min=1)
