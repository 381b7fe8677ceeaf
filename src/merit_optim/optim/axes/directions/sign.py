"""The sign of a momentum: Lion's direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.direction import Direction
from merit_optim.optim.axes.registered import register


@register("sign")
@dataclass(frozen=True, kw_only=True)
class Sign(Direction):
    """d = sign(beta1*m + (1-beta1)*g);  m <- beta2*m + (1-beta2)*g.  With equal betas signed momentum."""

    USES_STEP: ClassVar[bool] = False
    SCHEDULED: ClassVar[tuple[str, ...]] = ("betas",)

    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def keys(self) -> tuple[str, ...]:
        return ("exp_avg",)

    def check(self) -> None:
        validate.betas(self.betas)

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (stored,), (beta1, beta2) = state, self.betas
        exp_avg = stored.to(grad_NRC.dtype)
        mixed = torch.lerp(exp_avg, grad_NRC, 1 - beta1)
        # sign(NaN) is 0, which would silently freeze the weight.
        d_NRC = torch.where(mixed.isnan(), mixed, mixed.sign())
        return d_NRC, (torch.lerp(exp_avg, grad_NRC, 1 - beta2).to(stored.dtype),)
