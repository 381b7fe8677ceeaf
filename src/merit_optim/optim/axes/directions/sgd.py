"""The gradient, or its momentum as torch's SGD defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.direction import Direction
from merit_optim.optim.axes.registered import register


@register("sgd")
@dataclass(frozen=True, kw_only=True)
class Sgd(Direction):
    """M <- momentum*M + g;  d = M, or g + momentum*M with Nesterov.  As in ``torch.optim.SGD``."""

    USES_STEP: ClassVar[bool] = False
    SCHEDULED: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.9
    nesterov: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    def check(self) -> None:
        validate.fraction("momentum", self.momentum)
        validate.flag("nesterov", self.nesterov)

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (before,), dtype = state, grad_NRC.dtype
        stored = (before.to(dtype) * self.momentum + grad_NRC).to(before.dtype)
        momentum_NRC = stored.to(dtype)
        return grad_NRC + momentum_NRC * self.momentum if self.nesterov else momentum_NRC, (stored,)
