"""SophiaG: momentum divided by a cheap estimate of the curvature, and clipped."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim import validate
from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.engines.ranks.placements import local
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Item, Work, count_step, scalar, update_each
from merit_optim.optim.options import STEP_DEFAULTS, StepOptions, filled


class SophiaG(SafeOptimizer):
    """Second-order clipped optimization with the Gauss-Newton-Bartlett estimate of the diagonal Hessian.

        m <- beta1*m + (1-beta1)*g
        h <- beta2*h + (1-beta2)*B*g'*g'                 every hessian_interval steps
        w <- w - lr * (weight_decay*w + clamp(m / max(gamma*h, eps), -1, 1))

    where g' is the gradient of the mean loss over B labels sampled from the model's predictions. The
    training loop computes it on a part of the batch and calls ``update_hessian``.

    Args:
        params: parameters, named parameters, or parameter groups.
        lr: learning rate, a number or a one-element tensor.
        betas: decay of the momentum and of the curvature.
        gamma: how strongly the curvature shortens the step; larger clips fewer elements.
        eps: smallest value of ``gamma * h``.
        weight_decay: decoupled weight decay.
        hessian_interval: k, the number of steps between curvature estimates.
        options: ``state_dtype``, ``nonfinite``, ``max_grad_norm``, ``maximize``, ``capturable`` and
            ``differentiable``, as for ``MERIT``. ``nonfinite`` also applies to the gradients that
            ``update_hessian`` reads, which are never clipped.

    Examples:
        >>> import torch
        >>> from merit_optim import SophiaG, sampled_label_loss
        >>> model, x = torch.nn.Linear(8, 5), torch.randn(64, 8)
        >>> optimizer = SophiaG(model.parameters(), lr=1e-3)
        >>> if optimizer.hessian_due:
        ...     sampled_label_loss(model(x[:16])).backward()
        ...     optimizer.update_hessian(num_labels=16)
        ...     optimizer.zero_grad()
        >>> torch.nn.functional.cross_entropy(model(x), torch.arange(64) % 5).backward()
        >>> optimizer.step()

    Reference:
        Liu et al., "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
        Pre-training", ICLR 2024, https://arxiv.org/abs/2305.14342
    """

    ALGORITHM: ClassVar[str] = "sophiag"
    STATE_KEYS: ClassVar[tuple[str, ...]] = ("exp_avg", "hessian")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.965, 0.99),
        gamma: float = 0.05,
        eps: float = 1e-12,
        weight_decay: float = 0.1,
        *,
        hessian_interval: int = 10,
        **options: Unpack[StepOptions],
    ) -> None:
        validate.count("hessian_interval", hessian_interval)
        self.hessian_interval = hessian_interval
        defaults = {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | filled(type(self), options, STEP_DEFAULTS))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        validate.betas(group["betas"])
        validate.positive("gamma", group["gamma"], "the default 0.05")
        validate.epsilon(group["eps"], "1e-12")

    @property
    def hessian_due(self) -> bool:
        """Whether the curvature should be estimated before the next step."""
        steps = [state["step"] for state in self.state.values() if "step" in state]
        # The maximum: a parameter without a gradient in some steps has counted fewer.
        return not steps or max(int(step) for step in steps) % self.hessian_interval == 0

    @torch.no_grad()
    def update_hessian(self, num_labels: int) -> None:
        """Update the curvature estimate from ``.grad``, the gradients of ``sampled_label_loss``.

        Args:
            num_labels: B, the number of labels the loss was averaged over, on all ranks together.
        """
        validate.num_labels(num_labels)
        works, sharding = [local(work) for work in self._gather()], self._find_sharding()
        controls = self._controls(works, sharding, clips_norm=False) if works or sharding else None
        if controls is not None:
            update_each(works, controls, partial(_curvature, num_labels=num_labels))

    def _spec_of(self, group: dict[str, Any]) -> _Options:
        return _Options(group["betas"], group["gamma"], group["eps"], group["maximize"])

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        del sharding  # the update is element-wise, so ranks have nothing to exchange
        count_step(works, controls)
        update_each(works, controls, _sophia)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "hessian_interval": self.hessian_interval}


class _Options(NamedTuple):
    betas: tuple[float, float]
    gamma: float
    eps: float
    maximize: bool


def _sophia(
    item: Item, weight: Tensor, grad: Tensor, exp_avg: Tensor, hessian: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    options, dtype = item.spec, compute_dtype(weight)
    lr = scalar(item.lr, weight.device)
    exp_avg = torch.lerp(exp_avg.to(dtype), grad, 1 - options.betas[0])
    update = (exp_avg / (hessian.to(dtype) * options.gamma).clamp(min=options.eps)).clamp(-1, 1)
    weight = weight.to(dtype)
    return weight - (update + weight * item.weight_decay) * lr, exp_avg, hessian


def _curvature(
    item: Item, weight: Tensor, grad: Tensor, exp_avg: Tensor, hessian: Tensor, *, num_labels: int
) -> tuple[Tensor, Tensor, Tensor]:
    beta2, hessian = item.spec.betas[1], hessian.to(grad.dtype)
    return weight, exp_avg, torch.lerp(hessian, grad * grad * num_labels, 1 - beta2)


def sampled_label_loss(logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Mean cross entropy against labels sampled from the predictions.

    Its squared gradient, times the number of labels, is an unbiased estimate of the Gauss-Newton diagonal.

    Args:
        logits: (..., classes), with a gradient.
        generator: source of the random labels.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    labels = torch.multinomial(flat.detach().float().softmax(-1), 1, generator=generator).squeeze(1)
    return torch.nn.functional.cross_entropy(flat.float(), labels)
