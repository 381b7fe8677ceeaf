"""Adam's direction: the average gradient over the root of the average squared gradient.

    m <- b1*m + (1-b1)*g        v <- b2*v + (1-b2)*g*g
    d  = m / (sqrt(v) + eps)

with m and v divided by 1 - b1**t and 1 - b2**t if ``bias_correction`` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.direction import Direction
from merit_optim.optim.axes.registered import register


def moments(
    exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """Moving averages of the gradient and of its square."""
    return (
        torch.lerp(exp_avg, grad, 1 - beta1),
        (exp_avg_sq * beta2).addcmul(grad, grad, value=1 - beta2),
    )


class BiasCorrection(NamedTuple):
    """1 - beta1**t and the square root of 1 - beta2**t, the divisors of m and of sqrt(v)."""

    first: float | Tensor
    second_sqrt: float | Tensor


def bias_correction(step: float | Tensor, beta1: float, beta2: float) -> BiasCorrection:
    """The correction for moments that started at zero, after ``step`` steps.

    In double precision, because 1 - beta**t has few correct digits in float32 if beta is near 1.
    """
    if isinstance(step, Tensor):
        step = step.double()
    return BiasCorrection(1 - beta1**step, (1 - beta2**step) ** 0.5)


def quotient(
    exp_avg: Tensor, exp_avg_sq: Tensor, eps: float, correction: BiasCorrection | None = None
) -> Tensor:
    """d: m / (sqrt(v) + eps)."""
    denominator = exp_avg_sq.sqrt()
    if correction is not None:
        denominator = denominator / correction.second_sqrt
    d = exp_avg / (denominator + eps)
    return d if correction is None else d / correction.first


@register("adam")
@dataclass(frozen=True, kw_only=True)
class Adam(Direction):
    """Adam's direction. It is element-wise, so engines can compute it in pieces of any shape."""

    SCHEDULED: ClassVar[tuple[str, ...]] = ("betas", "eps")

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-6
    bias_correction: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def check(self) -> None:
        validate.betas(self.betas)
        validate.epsilon(self.eps, "1e-6")
        validate.flag("bias_correction", self.bias_correction)

    def correction(self, step: float | Tensor) -> BiasCorrection | None:
        """The bias correction after ``step`` steps, or None."""
        return bias_correction(step, *self.betas) if self.bias_correction else None

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        dtype = grad_NRC.dtype
        exp_avg, exp_avg_sq = state
        new = moments(exp_avg.to(dtype), exp_avg_sq.to(dtype), grad_NRC, *self.betas)
        stored = new[0].to(exp_avg.dtype), new[1].to(exp_avg_sq.dtype)
        return quotient(stored[0].to(dtype), stored[1].to(dtype), self.eps, self.correction(step)), stored
