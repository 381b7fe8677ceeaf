"""The definition itself, applied to each weight, for autograd through a step and for torch.compile.

Both need pure functions of whole tensors, which the compiler fuses better than pieces of them.
"""

from __future__ import annotations

from torch import Tensor

from merit_optim.optim import algorithm
from merit_optim.optim.engines.work import Controls, Item, Work, scalar, update_each


def step(works: list[Work], controls: Controls) -> None:
    """Update every weight and its state."""
    update_each(works, controls, _definition)


def _definition(item: Item, weight: Tensor, grad: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    result = algorithm.step(
        weight,
        grad,
        state,
        spec=item.spec,
        lr=scalar(item.lr, weight.device),
        weight_decay=item.weight_decay,
        step=item.step.clone(),  # autograd saves it, and the next step changes the count in place
    )
    return result.weight, *result.state
