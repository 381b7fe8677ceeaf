"""What a step computes: passes over micro-batches, then a step of any optimizer, or of two.

Also the validation loss, at the weights that an optimizer evaluates with.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from merit_lab.models import AttentionObservation
from merit_lab.models.base import Observe
from merit_lab.train.config import TrainConfig
from merit_lab.train.optimizer_options import is_from_library
from merit_lab.train.parallel import Ranks, drop_gathered, gradients_added
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.torch_private import foreach_mul_, version_of

MicroBatch = tuple[Tensor, Tensor]

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
    except _COMPLAINTS as error:
        # The author of a custom optimizer wants the traceback.
        if not is_from_library(type(optimizer)) or isinstance(error, torch.OutOfMemoryError):
            raise
        what, way_out = "the weights of this model", "give it only matrices with --optimizer.rest adamw"
        if any(isinstance(weight, DTensor) for weight in weights):
            what, way_out = "sharded weights", "use --parallel ddp"
        elif "does not have a grad_fn" in str(error):  # backward(create_graph=True) is not supported
            what, way_out = "without second derivatives", "for Sophia, use sophiag"
        raise ValueError(
            f"{name} could not step {what} ({type(error).__name__}: {error}); choose another, or {way_out}"
        ) from error


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


# --- forward and backward passes ---


class Passes:
    """Computes gradients and attention statistics of batches.

    Args:
        module: the model, wrapped for the ranks.
        rows: this rank's part of a batch, as (begin, end) for each micro-batch.
        ranks: the ranks of the run.
        bf16: whether matrix products are in bfloat16.
    """

    def __init__(
        self, module: nn.Module, rows: Sequence[tuple[int, int]], ranks: Ranks, *, bf16: bool
    ) -> None:
        self._module, self._ranks, self._is_bf16 = module, ranks, bf16
        num_rows = sum(end - begin for begin, end in rows)
        self._shares = [(end - begin) / num_rows for begin, end in rows]

    def autocast(self) -> torch.autocast:
        """Return a context with bf16 matrix products, if configured."""
        return torch.autocast(self._ranks.device.type, torch.bfloat16, enabled=self._is_bf16)

    def gradients(
        self, batch: Iterable[MicroBatch], observe: Observe = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add gradients of the mean loss over the global batch; return the loss and attention statistics."""
        loss = torch.zeros((), device=self._ranks.device)
        seen: list[tuple[AttentionObservation | None, float]] = []
        for i, ((inputs, targets), share) in enumerate(zip(batch, self._shares, strict=True)):
            with gradients_added(self._module, last=i == len(self._shares) - 1):
                with self.autocast():
                    output = self._module(inputs, targets, observe=observe)
                (output.loss * share).backward()
            loss += output.loss.detach() * share
            seen.append((output.attention, share))
        return self._ranks.sum(loss) / self._ranks.size, self._over_all(seen)

    def _over_all(self, seen: list[tuple[AttentionObservation | None, float]]) -> dict[str, Tensor]:
        """Return the attention statistics of the global batch; each micro-batch has a share of it."""
        observed = [(one, share) for one, share in seen if one is not None]
        if not observed:
            return {}
        largest = torch.stack([one.max_logits for one, _ in observed]).amax(0)
        found = {"max_logits": self._ranks.largest(largest)}
        entropies = [one.entropy * share for one, share in observed if one.entropy is not None]
        if entropies:
            found["entropy"] = self._ranks.sum(torch.stack(entropies).sum(0)) / self._ranks.size
        return found


@torch.no_grad()
def validation_loss(
    module: nn.Module, sequences: Tensor, micro_batch: int, ranks: Ranks
) -> tuple[float, float | None]:
    """Return the mean loss over ``sequences``, without dropout, and its standard error over them.

    Ranks take micro-batches in turn. All of these have one size, so that one compiled graph is enough: the
    last is filled up with its last sequence. Of one sequence there is no standard error.
    """
    module.eval()
    pieces = sequences.split(micro_batch)
    losses = torch.zeros(len(sequences), device=ranks.device)
    for turn in range(0, len(pieces), ranks.size):
        mine = turn + ranks.rank
        # A rank without a piece left still makes a pass: sharded models need every rank in each.
        piece = pieces[min(mine, len(pieces) - 1)].to(ranks.device)
        num = len(piece)
        if num < len(pieces[0]):
            piece = torch.cat([piece, piece[-1:].expand(len(pieces[0]) - num, -1)])
        inputs, targets = piece[:, :-1].contiguous(), piece[:, 1:].contiguous()
        found = module(inputs, targets, of_sequences=True).loss
        if mine < len(pieces):
            losses[mine * micro_batch :][:num] = found[:num]
    module.train()
    losses = ranks.sum(losses).double()
    mean, num = losses.mean().item(), len(losses)
    return mean, losses.std().item() / num**0.5 if num > 1 else None
