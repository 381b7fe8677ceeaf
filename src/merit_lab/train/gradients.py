"""The norm of every parameter's gradient, on the device, for whole and sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from merit_lab.train.parallel import Ranks
from merit_optim.optim.torch_private import foreach_mul_, foreach_norm


def gradient_norms(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Return the 2-norm of each gradient; it traces a NaN to its parameter without a host sync."""
    norms = torch.stack(foreach_norm(_local_gradients(parameters)))
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return ranks.sum(norms.square()).sqrt()
    return norms


def clip_gradients(parameters: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of norm ``norm`` down to ``max_norm``, as ``clip_grad_norm_`` does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    foreach_mul_(_local_gradients(parameters), factor)


def _local_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "every parameter takes part in the loss"
        gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return gradients
