"""Two optimizers that share a model: one for hidden matrices, another for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from merit_lab.train.closure import Closure, step_with_loss, weights_of


class OptimizerPair:
    """Steps both, and has the groups and the state of both.

    Args:
        first: of hidden matrices.
        rest: of everything else.
    """

    def __init__(self, first: Optimizer, rest: Optimizer) -> None:
        self.parts = (first, rest)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of both; the first's come first."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Tensor]) -> None:
        """Step both with the loss at the weights from before, which is all that each of them may ask for."""
        loss = closure()
        for part in self.parts:
            step_with_loss(part, Closure(loss, weights_of(part), again=partial(_refuse, part)))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """What torch has of each."""
        first, rest = (part.state_dict() for part in self.parts)
        return {"first": first, "rest": rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        for part, name in zip(self.parts, ("first", "rest"), strict=True):
            part.load_state_dict(state_dict[name])


AnyOptimizer = Optimizer | OptimizerPair


def parts_of(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    """The optimizers of torch's kind that an optimizer is."""
    return optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)


def _refuse(part: Optimizer) -> Tensor:
    raise ValueError(
        f"{type(part).__name__} computes the loss again within its step, at weights of its own choice; that "
        "is not done beside a second optimizer. Train with it alone, without optimizer.rest"
    )
