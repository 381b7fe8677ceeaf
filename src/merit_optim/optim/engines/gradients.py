"""What is asked of all gradients together: their norm, and whether they are finite.

Answered on the device, in one read and few calls: there may be hundreds of gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from merit_optim.optim.torch_private import foreach_norm


def total_norm(grads: dict[torch.device, list[Tensor]]) -> Tensor:
    """The 2-norm of all gradients together, on the first device, as ``clip_grad_norm_`` computes it.

    Half-precision gradients are summed in float32: their norm soon leaves the range of their dtype.
    """
    total: Tensor = torch.linalg.vector_norm(torch.cat(_norms(grads, 2.0)), 2.0)
    return total


def all_finite(grads: dict[torch.device, list[Tensor]], first: torch.device) -> Tensor:
    """Whether no gradient holds a NaN or an infinity: a 0-d bool on ``first``, in one read."""
    filled = {device: [x for x in some if x.numel()] for device, some in grads.items()}
    filled = {device: some for device, some in filled.items() if some}
    if not filled:
        return torch.ones((), dtype=torch.bool, device=first)
    if first.type == "cpu":
        # aminmax keeps NaN, needs no temporary and is six times faster here than an infinity norm.
        bounds = [
            bound.double().to(first) for some in filled.values() for x in some for bound in torch.aminmax(x)
        ]
        return torch.stack(bounds).isfinite().all()
    return torch.cat(_norms(filled, float("inf"))).isfinite().all().to(first)


def _norms(grads: dict[torch.device, list[Tensor]], order: float) -> list[Tensor]:
    """The norms of all gradients, one tensor for each device, on the first device. Few calls: they add up."""
    first = next(iter(grads))
    return [torch.stack(norms(some, order)).to(first, non_blocking=True) for some in grads.values()]


def norms(tensors: list[Tensor], order: float) -> tuple[Tensor, ...]:
    """The norm of each tensor, of one device."""
    found: tuple[Tensor, ...] = foreach_norm(tensors, order, dtype=_sum_dtype(tensors))
    return found


def _sum_dtype(tensors: list[Tensor]) -> torch.dtype | None:
    """The dtype to sum in: float32 for half precision; None where that is the tensors' own."""
    if all(x.dtype == torch.float32 for x in tensors):
        return None
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
