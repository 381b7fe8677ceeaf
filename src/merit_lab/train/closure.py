"""Steps of external optimizers, with a closure that can recompute the loss at other weights."""

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

from merit_lab.train.optimizer_names import is_from_library
from merit_optim.optim.torch_private import version_of

# What optimizers raise when they do not support the weights or gradients.
_COMPLAINTS = (RuntimeError, TypeError, AttributeError, LookupError, AssertionError)


class Closure:
    """The loss, which an optimizer may call for within its step.

    The loss and its gradients are known when a step begins. Once the optimizer has changed weights or
    gradients, ``again`` repeats the forward and backward passes.
    """

    def __init__(self, loss: Tensor, weights: Sequence[Tensor], again: Callable[[], Tensor]) -> None:
        self._loss, self._weights, self._again = loss, weights, again
        self._versions = [version_of(weight) for weight in weights]

    def __call__(self) -> Tensor:
        unchanged = all(
            weight.grad is not None and version_of(weight) == version
            for weight, version in zip(self._weights, self._versions, strict=True)
        )
        return self._loss if unchanged else self._again()


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def step_with_loss(optimizer: Optimizer, closure: Callable[[], Tensor]) -> None:
    """Take a step, with the closure if the optimizer accepts one. Explain known limitations in the error."""
    arguments: list[Any] = [closure] if "closure" in inspect.signature(optimizer.step).parameters else []
    name = type(optimizer).__name__
    try:
        optimizer.step(*arguments)
    except Exception as error:
        if "does not require grad and does not have a grad_fn" in str(error):
            raise ValueError(
                f"{name} differentiates the gradients, which needs backward(create_graph=True); that is not "
                "supported. Choose an optimizer without second derivatives; for Sophia, use sophiag"
            ) from error
        if any(isinstance(weight, DTensor) for weight in weights_of(optimizer)):
            raise ValueError(
                f"{name} could not step sharded weights ({type(error).__name__}: {error}); use --parallel ddp"
            ) from error
        # The author of a custom optimizer wants the traceback.
        if is_from_library(type(optimizer)) and _is_complaint(error):
            raise ValueError(
                f"{name} could not step the weights of this model ({type(error).__name__}: {error}); it may "
                "not support them. Choose another, or give it only matrices with --optimizer.rest adamw"
            ) from error
        raise


def _is_complaint(error: Exception) -> bool:
    return isinstance(error, _COMPLAINTS) and not isinstance(error, torch.OutOfMemoryError)


def seed_from(*parts: object) -> None:
    """Seed all generators from purpose, seed and step, so that a resumed run draws the same numbers."""
    drawn = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest()
    number = int.from_bytes(drawn, "little")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - external optimizers use the global generator
    torch.manual_seed(number)
