"""Steps of any optimizer: clipping, its loss, a second optimizer, and weights to evaluate."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from merit_lab.train.config import TrainConfig
from merit_lab.train.optimizer_names import is_from_library
from merit_lab.train.parallel import Ranks, drop_gathered
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.torch_private import foreach_mul_, version_of

# What optimizers raise when they do not support the weights or gradients.
_COMPLAINTS = (RuntimeError, TypeError, AttributeError, LookupError, AssertionError)


class OptimizerPair:
    """Two optimizers with the interface of one: the first has the hidden matrices, the other the rest."""

    def __init__(self, first: Optimizer, rest: Optimizer) -> None:
        self.parts = (first, rest)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of both optimizers, those of the first one first."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for part in self.parts:
            part.zero_grad()


AnyOptimizer = Optimizer | OptimizerPair


def parts_of(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    """Return the torch optimizers of a pair, or of one optimizer alone."""
    return optimizer.parts if isinstance(optimizer, OptimizerPair) else (optimizer,)


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def take_step(
    optimizer: AnyOptimizer,
    config: TrainConfig,
    norms: Tensor,
    parameters: Sequence[Tensor],
    loss: Tensor,
    step: int,
) -> None:
    """Take a step; clip gradients and skip non-finite steps as configured.

    The optimizers of this package do both themselves; for others it is done here.
    """
    if isinstance(optimizer, SafeOptimizer):
        optimizer.step()
        return
    if config.nonfinite == "skip" and not torch.linalg.vector_norm(norms).isfinite():
        return
    clip(norms, parameters, config)
    seed_from("optimizer", config.seed, step)  # without the rank: all ranks draw the same numbers
    for part in parts_of(optimizer):
        _step_with_loss(part, loss)


def _step_with_loss(optimizer: Optimizer, loss: Tensor) -> None:
    """Take a step; an optimizer may call for the loss. Explain known limitations in the error."""
    name, weights = type(optimizer).__name__, weights_of(optimizer)
    before = [version_of(weight) for weight in weights]

    def closure() -> Tensor:
        if before != [version_of(weight) for weight in weights]:
            raise ValueError(
                f"{name} recomputes the loss within its step, at other weights; that is not supported. "
                "Choose an optimizer that takes one gradient a step"
            )
        return loss

    arguments: list[Any] = [closure] if "closure" in inspect.signature(optimizer.step).parameters else []
    try:
        optimizer.step(*arguments)
    except Exception as error:
        if "does not require grad and does not have a grad_fn" in str(error):
            raise ValueError(
                f"{name} differentiates the gradients, which needs backward(create_graph=True); that is not "
                "supported. Choose an optimizer without second derivatives; for Sophia, use sophiag"
            ) from error
        if any(isinstance(weight, DTensor) for weight in weights):
            raise ValueError(
                f"{name} could not step sharded weights ({type(error).__name__}: {error}); use --parallel ddp"
            ) from error
        # The author of a custom optimizer wants the traceback.
        is_complaint = isinstance(error, _COMPLAINTS) and not isinstance(error, torch.OutOfMemoryError)
        if is_from_library(type(optimizer)) and is_complaint:
            raise ValueError(
                f"{name} could not step the weights of this model ({type(error).__name__}: {error}); it may "
                "not support them. Choose another, or give it only matrices with --optimizer.rest adamw"
            ) from error
        raise


def seed_from(*parts: object) -> None:
    """Seed all generators from purpose, seed and step, so that a resumed run draws the same numbers."""
    drawn = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=4).digest()
    number = int.from_bytes(drawn, "little")
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - external optimizers use the global generator
    torch.manual_seed(number)


# --- norms of gradients and weights, on the device, for whole and sharded parameters ---


def gradient_norms(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the 2-norm of each gradient; it traces a NaN to its parameter without a host sync."""
    return _norms(_local_gradients(parameters), parameters, ranks)


@torch.no_grad()
def weight_norm(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the 2-norm of all weights together."""
    return _norms([_local(one) for one in parameters], parameters, ranks).square().sum().sqrt()


def clip(norms: Tensor, parameters: Sequence[Tensor], config: TrainConfig) -> None:
    """Scale gradients down to the configured global norm, given the norm of each."""
    if (most := config.optimizer.max_grad_norm) is not None:
        factor = (most / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
        foreach_mul_(_local_gradients(parameters), factor)


def _local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients), "every parameter takes part in the loss"
    return [_local(gradient) for gradient in gradients if gradient is not None]


def _norms(local: list[Tensor], parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """The 2-norm of each tensor, of which this rank has ``local``, split as the parameters are."""
    of_each = torch.stack(norms(local, 2.0))
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ranks.sum(of_each.square()).sqrt()
    return of_each


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- optimizers with two sets of weights, one to train and one to evaluate, such as schedule-free ones ---


def has_modes(optimizer: AnyOptimizer) -> bool:
    """Whether ``optimizer.eval()`` switches to other weights than those that are trained."""
    return any(_has_modes(part) for part in parts_of(optimizer))


@contextlib.contextmanager
def weights_to_use(optimizer: AnyOptimizer, module: nn.Module) -> Iterator[list[Tensor]]:
    """Give the model its evaluation weights inside the context, and restore the trained ones bit for bit.

    Yields copies of the trained weights: switching back with ``optimizer.train()`` would round them.
    Optimizers without modes have one set of weights; for them the list is empty.
    """
    parts: list[Any] = [part for part in parts_of(optimizer) if _has_modes(part)]
    weights = [weight for part in parts for weight in weights_of(part)]
    trained = [weight.detach().clone() for weight in weights]
    switched = [part for part in parts if any(part.state.values())]  # before the first step there is one set
    for part in switched:
        part.eval()
    if parts:
        drop_gathered(module)
    try:
        yield trained
    finally:
        for part in switched:
            part.train()
        copy_into(weights, trained)
        if parts:
            drop_gathered(module)


@torch.no_grad()
def copy_into(weights: list[Tensor], values: list[Tensor]) -> None:
    """Copy ``values`` into ``weights``."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _has_modes(part: object) -> bool:
    return all(callable(getattr(part, mode, None)) for mode in ("train", "eval"))
