"""Steps of optimizers from outside: with the loss, which they may ask for again at other weights."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from merit_lab.train.own_optimizer import is_by_others

# What an optimizer raises that is given weights or gradients that it is not meant for.
_COMPLAINTS = (RuntimeError, TypeError, AttributeError, LookupError, AssertionError)


class Closure:
    """The loss, as an optimizer may call for it within its step.

    The gradients are there when a step begins. So the loss is known as long as the optimizer has changed
    neither weights nor gradients; after that forward and backward passes are made ``again``.
    """

    def __init__(self, loss: Tensor, weights: Sequence[Tensor], again: Callable[[], Tensor]) -> None:
        self._loss, self._weights, self._again = loss, weights, again
        self._versions = [weight._version for weight in weights]

    def __call__(self) -> Tensor:
        unchanged = all(
            weight.grad is not None and weight._version == version
            for weight, version in zip(self._weights, self._versions, strict=True)
        )
        return self._loss if unchanged else self._again()


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def step_with_loss(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    """Step, with the closure if the optimizer takes one; what it cannot do here is told in a sentence."""
    arguments: list[Any] = [closure] if "closure" in inspect.signature(optimizer.step).parameters else []
    name = type(optimizer).__name__
    try:
        optimizer.step(*arguments)
    except Exception as error:
        if "does not require grad and does not have a grad_fn" in str(error):
            raise ValueError(
                f"{name} differentiates the gradients, which needs backward(create_graph=True); this is not "
                "done here. Choose an optimizer that does without second derivatives; of Sophia, sophiag does"
            ) from error
        if any(isinstance(weight, DTensor) for weight in weights_of(optimizer)):
            raise ValueError(
                f"{name} could not step weights that are sharded ({type(error).__name__}: {error}); train it "
                "with --parallel ddp"
            ) from error
        # The author of any other wants to see where.
        if is_by_others(type(optimizer)) and _is_complaint(error):
            raise ValueError(
                f"{name} could not step the weights of this model ({type(error).__name__}: {error}); it may "
                "be meant for others. Choose another, or give it matrices alone with --optimizer.rest adamw"
            ) from error
        raise


def _is_complaint(error: Exception) -> bool:
    return isinstance(error, _COMPLAINTS) and not isinstance(error, torch.OutOfMemoryError)


def seed_from(*what: object) -> None:
    """Let random numbers follow from what they are for, seed and step: a resumed run draws the same."""
    drawn = hashlib.blake2b(" ".join(map(str, what)).encode(), digest_size=4).digest()
    number = int.from_bytes(drawn, "little")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - others draw from the global generator
    torch.manual_seed(number)
