"""One ratio for the whole weight: LAMB's, and with the largest magnitude maxLAMB's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.ratios.ratio import Ratio, Sizes
from merit_optim.optim.axes.registered import register
from merit_optim.optim.matrices import Matrices, View


@register("weight")
@dataclass(frozen=True, kw_only=True)
class Weight(Ratio):
    """s = |w| / |u|, or what became of it since the first step."""

    calibrated: bool = False
    """Divide the ratio by its first value, as OrScale does."""

    def check(self) -> None:
        super().check()
        validate.flag("calibrated", self.calibrated)

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        if self.calibrated and view.split is not None:
            return "calibrated=True keeps one ratio per weight: use split=None"
        return None

    @property
    def keys(self) -> tuple[str, ...]:
        return ("first_ratio",) if self.calibrated else ()

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        return ((matrices.num, 1, 1),) * len(self.keys)

    def combine(self, row: Tensor | None, column: Tensor | None, whole: Tensor) -> Tensor:
        return whole

    def remember(
        self, ratios: Sizes, undefined: Sizes, state: tuple[Tensor, ...]
    ) -> tuple[Sizes, tuple[Tensor, ...]]:
        """The ratio relative to the first one. Zero stands for none yet.

        An undefined ratio is 1, and is not the first one.
        """
        if not self.calibrated:
            return ratios, state
        (first_N11,), now_N11 = state, ratios.whole_N[:, None, None]
        no_ratio_N11 = undefined.whole_N[:, None, None]
        first_N11 = torch.where((first_N11 == 0) & ~no_ratio_N11, now_N11, first_N11)
        relative_N = (now_N11 / first_N11.masked_fill(no_ratio_N11, 1)).flatten()
        return ratios._replace(whole_N=relative_N), (first_N11,)
