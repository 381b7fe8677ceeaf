"""The Hessian of a loss, as products with vectors.

A product is the derivative of the gradient along the vector: forward, backward, and backward through both. It
costs about as much as two to three training steps, and no more memory than the graphs of one micro-batch.
Forward-mode derivatives would be cheaper, but those of LayerNorm are wrong in torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Losses = Callable[[], Iterable[Tensor]]
"""Yields the parts of a loss, such as those of micro-batches, one at a time; the loss is their sum."""

_DIVERGED = "a run that diverged has no curvature: choose an earlier checkpoint"


def hessian_vector_product(losses: Losses, parameters: Sequence[Tensor], vector: Tensor) -> Tensor:
    """Return the product of the Hessian of ``losses`` with a flat ``vector``.

    Every operation between parameters and loss must have a second derivative: for attention that is only the
    math kernel (``attention="math"`` for the lab's models, ``sdpa_kernel(SDPBackend.MATH)`` for others).

    Args:
        losses: called once; each part's graph is freed before the next part is requested.
        parameters: the variables, in the order of ``vector``.
        vector: as long as all parameters together, on their device.

    Raises:
        FloatingPointError: the product, or the loss itself, is not finite.
    """
    split = vector.split([parameter.numel() for parameter in parameters])
    pieces = [piece.view(parameter.shape) for piece, parameter in zip(split, parameters, strict=True)]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for part in losses():
        for sum_, product in zip(total, _differentiate_twice(part, parameters, pieces), strict=True):
            sum_ += product
        del part  # otherwise its graph would stay in memory with the next one's
    product = torch.cat([part.flatten() for part in total])
    if not product.isfinite().all():
        raise FloatingPointError(_describe_nonfinite(losses, product))
    return product


class Hessian:
    """The Hessian of a loss at the current parameters, as an operator: ``hessian @ vector``.

    Args:
        losses: see :func:`hessian_vector_product`.
        parameters: see there; all on one device and of one dtype. Those without gradients are left out.
        after_product: called after each product, to show progress or to raise an exception.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian = Hessian(lambda: [(x**3).sum()], [x])
        >>> hessian @ torch.tensor([1.0, 1.0])  # diagonal, 6 x
        tensor([ 6., 12.])
    """

    def __init__(
        self, losses: Losses, parameters: Iterable[Tensor], after_product: Callable[[], None] | None = None
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.num_products = 0
        self._losses = losses
        self._after_product = after_product

    def loss(self) -> float:
        """Return the loss. Raise FloatingPointError if it is not finite."""
        loss = _value(self._losses)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss:g}; {_DIVERGED}")
        return loss

    def __matmul__(self, vector: Tensor) -> Tensor:
        product = hessian_vector_product(self._losses, self.parameters, vector)
        self.num_products += 1
        if self._after_product is not None:
            self._after_product()
        return product


def dot(left: Tensor, right: Tensor) -> float:
    """Return the inner product, summed in float64: there may be 1e9 terms of both signs."""
    return (left * right).sum(dtype=torch.float64).item()


def _differentiate_twice(
    loss: Tensor, parameters: Sequence[Tensor], pieces: Sequence[Tensor]
) -> Sequence[Tensor]:
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    # A gradient that depends on no parameter has no graph; its derivative is zero.
    with_graph = [pair for pair in zip(gradients, pieces, strict=True) if pair[0].requires_grad]
    if not with_graph:
        return [torch.zeros_like(parameter) for parameter in parameters]
    outputs, directions = zip(*with_graph, strict=True)
    return torch.autograd.grad(outputs, parameters, grad_outputs=directions, materialize_grads=True)


def _describe_nonfinite(losses: Losses, product: Tensor) -> str:
    count = int((~product.isfinite()).sum())
    return (
        f"{count} of {product.numel()} elements of a product with the Hessian are not finite, and the loss "
        f"is {_value(losses):g}; {_DIVERGED}. "
        "If the loss is finite, an operation of the model has no finite second derivative."
    )


@torch.no_grad()
def _value(losses: Losses) -> float:
    return sum(part.item() for part in losses())
