"""Norms of gradients and weights, on the device, for whole and sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from merit_lab.train.parallel import Ranks
from merit_optim.optim.engines.gradients import norms
from merit_optim.optim.torch_private import foreach_mul_


def gradient_norms(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the 2-norm of each gradient; it traces a NaN to its parameter without a host sync."""
    return _norms(_local_gradients(parameters), parameters, ranks)


@torch.no_grad()
def weight_norm(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the 2-norm of all weights together."""
    return _norms([_local(one) for one in parameters], parameters, ranks).square().sum().sqrt()


def clip_gradients(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of norm ``norm`` down to ``max_norm``, as ``clip_grad_norm_`` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    foreach_mul_(_local_gradients(parameters), factor)


def _local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "every parameter takes part in the loss"
        gradients.append(_local(gradient))
    return gradients


def _norms(local: list[Tensor], parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """The 2-norm of each tensor, of which this rank has ``local``, split as the parameters are."""
    of_each = torch.stack(norms(local, 2.0))
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ranks.sum(of_each.square()).sqrt()
    return of_each


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
