"""The definition itself, applied to each weight: for autograd through a step and for torch.compile.

Both want pure functions of whole tensors, and the compiler fuses their operations better than our
cutting into pieces would.
"""

from __future__ import annotations

from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.engines.eager import rule_of
from merit_optim.optim.engines.work import Controls, Item, Work, scalar, update_each


def step(works: list[Work], controls: Controls) -> None:
    """Update every weight and its state."""
    update_each(works, controls, _definition)


def _definition(
    item: Item, weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> algorithm.Result:
    group, correction = item.group, None
    if group["bias_correction"]:
        # Cloned: autograd must not see the count change in the next step.
        correction = algorithm.bias_correction(item.step.clone(), *group["betas"])
    return algorithm.step(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        lr=scalar(group["lr"], weight.device),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        rule=rule_of(group),
        matrix_dims=group["matrix_dims"],
        correction=correction,
    )
