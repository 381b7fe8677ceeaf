"""The mean cross-entropy of a linear layer's outputs, without storing all of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from merit_lab.models.base import at_least_float32


def linear_cross_entropy(
    inputs: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, of_rows: bool = False
) -> Tensor:
    """Return the mean of ``cross_entropy(inputs @ weight.T, targets)``, in float32 for half precision.

    With a ``chunk``, the logits of that many rows are computed at a time, together with their share of the
    gradients: three matrix products in all, as without chunks, and no logits are kept for backward. GPT-2
    small's logits for 65536 tokens are 6.1 GiB in bf16, and as much again for their gradient; in chunks of
    8192 they are an eighth, at the cost of one float32 copy of the weight's gradient. torch 2.13 has a
    similar function of this name, but older versions do not, and it does not work inside ``torch.compile``.

    Args:
        inputs: (rows, width), in the dtype of the matrix products.
        weight: (classes, width); float32 weights get a float32 gradient.
        targets: (rows,), int64.
        chunk: rows at a time; 0 for all, which can be differentiated twice.
        of_rows: return the loss of every row instead of their mean, without a gradient.
    """
    has_gradient = torch.is_grad_enabled() and (inputs.requires_grad or weight.requires_grad)
    if chunk and has_gradient and not of_rows:
        fused = torch.compiler.is_compiling()
        loss: Tensor = _operator(inputs, weight, targets, chunk=chunk, fused=fused)[0]
        return loss
    if not chunk and not of_rows:
        return F.cross_entropy(at_least_float32(F.linear(inputs, weight.to(inputs.dtype))), targets)
    with torch.no_grad():
        cast, parts = weight.to(inputs.dtype), chunk or len(inputs)
        losses = torch.cat(
            [
                F.cross_entropy(at_least_float32(F.linear(rows, cast)), wanted, reduction="none")
                for rows, wanted in zip(inputs.split(parts), targets.split(parts), strict=True)
            ]
        )
    return losses if of_rows else losses.mean()


def loss_and_gradients(
    inputs: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss and its gradients with respect to ``inputs`` and ``weight``."""
    differentiate = _fused_softmax() if fused else _softmax
    with torch.autocast(inputs.device.type, enabled=False):
        cast = weight.to(inputs.dtype)
        total = at_least_float32(inputs.new_zeros(()))
        inputs_grad = torch.empty_like(inputs)
        # float32, since many chunks are added; it is also more accurate than autocast's one bf16 product.
        weight_grad = torch.zeros_like(weight, dtype=total.dtype)
        parts = (tensor.split(chunk) for tensor in (inputs, targets, inputs_grad))
        for rows, wanted, rows_grad in zip(*parts, strict=True):
            loss, logits_grad = differentiate(rows @ cast.T, wanted, inputs.shape[0])
            total += loss
            torch.mm(logits_grad, cast, out=rows_grad)
            weight_grad += logits_grad.T @ rows
        return total / inputs.shape[0], inputs_grad, weight_grad.to(weight.dtype)


# A custom operator, because torch.compile would unroll the loop: with all chunks in one graph, it used more
# memory than without chunks (GPT-2 small, H200), and compiled each of them.
_operator = torch.library.custom_op(
    "merit_optim::cross_entropy_and_gradients", loss_and_gradients, mutates_args=()
)


@_operator.register_fake
def _(
    inputs: Tensor,
    weight: Tensor,
    targets: Tensor,  # noqa: ARG001
    *,
    chunk: int,  # noqa: ARG001
    fused: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    return at_least_float32(inputs.new_empty(())), torch.empty_like(inputs), torch.empty_like(weight)


def _softmax(logits: Tensor, wanted: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the summed loss of some of ``num_rows`` rows, and the mean loss's gradient by their logits."""
    gradient = at_least_float32(logits)
    log_sum = gradient.logsumexp(dim=1, keepdim=True)
    loss = (log_sum - gradient.gather(1, wanted[:, None])).sum()
    # A comparison, not a scatter: the compiler fuses all of it into one kernel, without float32 logits.
    classes = torch.arange(logits.shape[1], device=logits.device)
    is_target = (classes == wanted[:, None]).to(gradient.dtype)
    gradient = gradient.sub(log_sum).exp_().sub_(is_target).div_(num_rows).to(logits.dtype)
    return loss, gradient


@cache
def _fused_softmax() -> Any:
    return torch.compile(_softmax, dynamic=False)


def _keep_gradients(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:  # noqa: ARG001
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    # A second derivative would treat these gradients as constants and be silently wrong.
    # While a compiler traces this, gradients are enabled for another reason, and it refuses by itself.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "the chunked loss cannot be differentiated twice (create_graph=True); build the model with "
            "attention='math', or with loss_chunk=0"
        )
    inputs_grad, weight_grad = ctx.saved_tensors
    return inputs_grad * grad_loss, weight_grad * grad_loss, None


_operator.register_autograd(_scale_gradients, setup_context=_keep_gradients)
