"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim import validate
from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Item, Work, count_step, scalar, update_each
from merit_optim.optim.options import STEP_DEFAULTS, StepOptions, filled


class Lion(SafeOptimizer):
    """Evolved sign momentum, one state tensor for each parameter.

        w <- w - lr * (sign(beta1*m + (1-beta1)*g) + weight_decay*w)
        m <- beta2*m + (1-beta2)*g

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, a number or a one-element tensor; 3 to 10 times smaller than AdamW's.
        betas: interpolation for the update, and decay of the momentum.
        weight_decay: decoupled weight decay.
        options: ``state_dtype``, ``nonfinite``, ``max_grad_norm``, ``maximize``, ``capturable`` and
            ``differentiable``, as for ``MERIT``.

    Examples:
        >>> import torch
        >>> from merit_optim import Lion
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=0.1)

    Reference:
        Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023,
        https://arxiv.org/abs/2302.06675
    """

    ALGORITHM: ClassVar[str] = "lion"
    STATE_KEYS: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[StepOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults | filled(type(self), options, STEP_DEFAULTS))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        validate.betas(group["betas"])

    def _spec_of(self, group: dict[str, Any]) -> _Options:
        return _Options(group["betas"], group["maximize"])

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        del sharding  # the update is element-wise, so ranks have nothing to exchange
        count_step(works, controls)
        update_each(works, controls, _lion)


class _Options(NamedTuple):
    betas: tuple[float, float]
    maximize: bool


def _lion(item: Item, weight: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[Tensor, Tensor]:
    beta1, beta2 = item.spec.betas
    lr = scalar(item.lr, weight.device)
    dtype = compute_dtype(weight)
    weight, exp_avg = weight.to(dtype), exp_avg.to(dtype)
    mixed = torch.lerp(exp_avg, grad, 1 - beta1)
    # sign(NaN) is 0, which would silently freeze the weight.
    update = torch.where(mixed.isnan(), mixed, mixed.sign()) + weight * item.weight_decay
    return weight - update * lr, torch.lerp(exp_avg, grad, 1 - beta2)
