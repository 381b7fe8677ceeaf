"""Adam's direction with a second, slow average of the gradient: AdEMAMix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.adam import bias_correction, moments
from merit_optim.optim.axes.directions.direction import Direction
from merit_optim.optim.axes.registered import register


@register("two-averages")
@dataclass(frozen=True, kw_only=True)
class TwoAverages(Direction):
    """d = (m / (1 - beta1**t) + slow_weight*s) / (sqrt(v / (1 - beta2**t)) + eps).

        m <- beta1*m + (1-beta1)*g      s <- slow_beta*s + (1-slow_beta)*g      v <- beta2*v + (1-beta2)*g*g

    Pagliardini et al., "The AdEMAMix Optimizer: Better, Faster, Older", 2024,
    https://arxiv.org/abs/2409.03137. Its schedules of ``slow_weight`` and ``slow_beta`` are the user's:
    both may be changed in the group in every step.
    """

    SCHEDULED: ClassVar[tuple[str, ...]] = ("betas", "eps", "slow_beta", "slow_weight")

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    slow_beta: float = 0.9999
    slow_weight: float = 5.0

    @property
    def keys(self) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_slow", "exp_avg_sq"

    def check(self) -> None:
        validate.betas(self.betas)
        validate.epsilon(self.eps, "1e-8")
        validate.fraction("slow_beta", self.slow_beta)
        validate.at_least_zero("slow_weight", self.slow_weight)

    def advance(
        self, grad_NRC: Tensor, state: tuple[Tensor, ...], step: float | Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        dtype = grad_NRC.dtype
        exp_avg, slow, exp_avg_sq = (x.to(dtype) for x in state)
        exp_avg, exp_avg_sq = moments(exp_avg, exp_avg_sq, grad_NRC, *self.betas)
        slow = torch.lerp(slow, grad_NRC, 1 - self.slow_beta)
        new = (exp_avg, slow, exp_avg_sq)
        stored = tuple(x.to(before.dtype) for x, before in zip(new, state, strict=True))
        exp_avg, slow, exp_avg_sq = (x.to(dtype) for x in stored)
        correction = bias_correction(step, *self.betas)
        denominator = exp_avg_sq.sqrt() / correction.second_sqrt + self.eps
        return (exp_avg / correction.first + slow * self.slow_weight) / denominator, stored
