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

_DIVERGED = "a run that diverged has no curvature: choose an earlier checkpoint"


class Hessian:
    """The Hessian of a loss at the current parameters, as an operator: ``hessian @ vector``.

    Every operation between parameters and loss must have a second derivative: for attention that is only the
    math kernel (``attention="math"`` for the lab's models, ``sdpa_kernel(SDPBackend.MATH)`` for others).

    Args:
        losses: yields the parts of the loss, such as those of micro-batches; the loss is their sum. Each
            part's graph is freed before the next part is requested.
        parameters: all on one device and of one dtype; a vector has their elements in this order. Those
            without gradients are left out.
        after_product: called after each product, to show progress or to raise an exception.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hessian = Hessian(lambda: [(x**3).sum()], [x])
        >>> hessian @ torch.tensor([1.0, 1.0])  # diagonal, 6 x
        tensor([ 6., 12.])
    """

    def __init__(
        self,
        losses: Callable[[], Iterable[Tensor]],
        parameters: Iterable[Tensor],
        after_product: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.device, self.dtype = self.parameters[0].device, self.parameters[0].dtype
        self.size = sum(parameter.numel() for parameter in self.parameters)
        self.num_products = 0
        self._losses = losses
        self._after_product = after_product

    def loss(self) -> float:
        """Return the loss. Raise FloatingPointError if it is not finite."""
        loss = self._value()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss:g}; {_DIVERGED}")
        return loss

    def __matmul__(self, vector: Tensor) -> Tensor:
        split = vector.split([parameter.numel() for parameter in self.parameters])
        pieces = [piece.view_as(weight) for piece, weight in zip(split, self.parameters, strict=True)]
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        for part in self._losses():
            for sum_, product in zip(total, self._differentiate_twice(part, pieces), strict=True):
                sum_ += product
            del part  # otherwise its graph would stay in memory with the next one's
        product = torch.cat([part.flatten() for part in total])
        if not product.isfinite().all():
            raise FloatingPointError(
                f"{int((~product.isfinite()).sum())} of {product.numel()} elements of a product with the "
                f"Hessian are not finite, and the loss is {self._value():g}; {_DIVERGED}. "
                "If the loss is finite, an operation of the model has no finite second derivative."
            )
        self.num_products += 1
        self._after_product()
        return product

    def _differentiate_twice(self, loss: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        gradients = torch.autograd.grad(loss, self.parameters, create_graph=True, materialize_grads=True)
        # A gradient that depends on no parameter has no graph; its derivative is zero.
        with_graph = [pair for pair in zip(gradients, pieces, strict=True) if pair[0].requires_grad]
        if not with_graph:
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        outputs, directions = zip(*with_graph, strict=True)
        return torch.autograd.grad(outputs, self.parameters, grad_outputs=directions, materialize_grads=True)

    @torch.no_grad()
    def _value(self) -> float:
        return sum(part.item() for part in self._losses())


def dot(left: Tensor, right: Tensor) -> float:
    """Return the inner product, summed in float64: there may be 1e9 terms of both signs."""
    return (left * right).sum(dtype=torch.float64).item()
