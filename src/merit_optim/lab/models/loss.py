"""The mean cross-entropy of a linear layer's outputs, without holding all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merit_optim.lab.models.precision import at_least_float32


def linear_cross_entropy(inputs: Tensor, weight: Tensor, targets: Tensor, *, chunk: int) -> Tensor:
    """The mean of ``cross_entropy(inputs @ weight.T, targets)``, in float32 for half precision.

    With a ``chunk``, the logits of that many rows are formed at one time, and with them at once their
    share of the gradients: three matrix products in all, as without chunks, and no logits kept for
    backward. GPT-2 small's logits for 65536 tokens are 6.1 GiB in bf16, and as much again for their
    gradient; in chunks of 8192 they are an eighth, at the cost of one float32 copy of the weight's
    gradient. torch 2.13 has a function of this name that does it too, but not for older versions, and
    not inside ``torch.compile``, which fuses this one's softmax and casts.

    Args:
        inputs: (rows, width), in the dtype of the matrix products.
        weight: (classes, width); float32 weights get a float32 gradient.
        targets: (rows,), int64.
        chunk: rows at one time; 0 for all, which can be differentiated twice.
    """
    if not chunk:
        return F.cross_entropy(at_least_float32(F.linear(inputs, weight.to(inputs.dtype))), targets)
    if torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad):
        loss: Tensor = _ChunkedCrossEntropy.apply(inputs, weight, targets, chunk)  # type: ignore[no-untyped-call]
        return loss
    cast = weight.to(inputs.dtype)
    total = at_least_float32(inputs.new_zeros(()))
    for rows, wanted in zip(inputs.split(chunk), targets.split(chunk), strict=True):
        total = total + F.cross_entropy(at_least_float32(F.linear(rows, cast)), wanted, reduction="sum")
    return total / inputs.shape[0]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, where the logits are; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        cast = weight.to(inputs.dtype)
        classes = torch.arange(weight.shape[0], device=weight.device)
        total = at_least_float32(inputs.new_zeros(()))
        inputs_grads = []
        # float32, since many chunks are added; also kinder than autocast's one bf16 product.
        weight_grad = torch.zeros_like(weight, dtype=total.dtype)
        for rows, wanted in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            logits = rows @ cast.T
            gradient = at_least_float32(logits)
            log_sum = gradient.logsumexp(dim=1, keepdim=True)
            total = total + (log_sum - gradient.gather(1, wanted[:, None])).sum()
            # A comparison, not a scatter: the compiler makes one kernel of it all, and no float32 logits.
            is_target = (classes == wanted[:, None]).to(gradient.dtype)
            gradient = gradient.sub_(log_sum).exp_().sub_(is_target).div_(inputs.shape[0]).to(inputs.dtype)
            inputs_grads.append(gradient @ cast)
            weight_grad += gradient.T @ rows
        ctx.save_for_backward(torch.cat(inputs_grads), weight_grad.to(weight.dtype))
        return total / inputs.shape[0]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        # A second derivative would take these gradients for constants and be wrong without a word.
        # Where a compiler traces this, gradients are on for another reason, and it refuses by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the loss by chunks cannot be differentiated twice (create_graph=True); build the model with "
                "attention='math', or with loss_chunk=0"
            )
        inputs_grad, weight_grad = ctx.saved_tensors
        return inputs_grad * grad_loss, weight_grad * grad_loss, None, None
