"""Two optimizers that share a model: one for hidden matrices, another for the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from merit_lab.train.closure import Closure, step_with_loss, weights_of


class OptimizerPair:
    """Two optimizers with the interface of one.

    Args:
        first: the optimizer of hidden matrices.
        rest: the optimizer of everything else.
    """

    def __init__(self, first: Optimizer, rest: Optimizer) -> None:
        self.parts = (first, rest)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both optimizers, those of the first one first."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Tensor]) -> None:
        """Step both with the loss at the current weights; neither may recompute it at others."""
        loss = closure()
        for part in self.parts:
            step_with_loss(part, Closure(loss, weights_of(part), again=partial(_refuse, part)))

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad()


AnyOptimizer = Optimizer | OptimizerPair


def parts_of(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    """Return the torch optimizers of a pair, or of one optimizer alone."""
    return optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)


def _refuse(part: Optimizer) -> Tensor:
    raise ValueError(
        f"{type(part).__name__} recomputes the loss within its step, at other weights; that is not supported "
        "with a second optimizer. Use it alone, without optimizer.rest"
    )
