"""One ratio for each row or for each column; the only one of a vector is that of all of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from merit_optim.optim.axes.ratios.ratio import Ratio
from merit_optim.optim.axes.registered import register


@register("row")
@dataclass(frozen=True, kw_only=True)
class Row(Ratio):
    """s_i = |w_i.| / |u_i.|"""

    @property
    def lines(self) -> tuple[str, ...]:
        return ("rows",)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return whole if row is None else row


@register("column")
@dataclass(frozen=True, kw_only=True)
class Column(Ratio):
    """s_j = |w_.j| / |u_.j|"""

    @property
    def lines(self) -> tuple[str, ...]:
        return ("columns",)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return whole if column is None else column
