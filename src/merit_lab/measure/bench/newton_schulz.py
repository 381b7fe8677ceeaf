"""The time of Newton-Schulz for all hidden matrices of a model, without the rest of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from merit_lab.measure.bench.floor import newton_schulz_flops
from merit_lab.measure.bench.shapes import Parameters, Tensors
from merit_lab.measure.bench.timing import median, step_times
from merit_optim.optim.directions import Muon
from merit_optim.optim.directions.newton_schulz import polar
from merit_optim.optim.engines import fused_unavailable

_MUON = Muon()


def orthogonaliser(stack_NRC: Tensor) -> Callable[[Tensor], object]:
    """Return the function with which a step orthogonalises such a stack of matrices."""
    if stack_NRC.device.type != "cuda" or fused_unavailable():
        return one_by_one
    from merit_optim.optim.engines.fused.engine import MAX_HELD
    from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar, num_together

    num, rows, columns = stack_NRC.shape
    iteration, together = Iteration.of(_MUON, rows, columns), num_together(num, rows * columns, MAX_HELD)
    batches = [Polar(len(some), iteration) for some in stack_NRC.split(together)]

    def batch_by_batch(stack_NRC: Tensor) -> None:
        for batch, some_NRC in zip(batches, stack_NRC.split(together), strict=True):
            batch(some_NRC)

    return batch_by_batch


def one_by_one(stack_NRC: Tensor) -> None:
    """As in the eager engine: each polar factor is freed before the next is computed."""
    products = getattr(torch, _MUON.ns_dtype)
    for matrix_1RC in stack_NRC.split(1):
        polar(matrix_1RC, _MUON.coefficients, _MUON.ns_steps, products, _MUON.eps)


@dataclass(frozen=True)
class NewtonSchulz:
    """The time of Newton-Schulz, and the rate of its products."""

    model: str
    num_matrices: int
    num_flops: int
    median_ms: float
    tflop_s: float
    share: float
    """``tflop_s`` relative to a large product."""


def measure_newton_schulz(
    params: Parameters, model: str, seconds: float, matrix_tflop_s: float
) -> NewtonSchulz:
    """Time Newton-Schulz for the hidden matrices of a model, in the dtype that a step uses."""
    by_shape: dict[torch.Size, Tensors] = {}
    for param in params.hidden:
        assert param.grad is not None
        by_shape.setdefault(param.shape, []).append(param.grad.to(getattr(torch, _MUON.ns_dtype)))
    stacks = [torch.stack(matrices) for matrices in by_shape.values()]
    # A step overwrites its input, and the result may be faster to multiply.
    copies = list(map(torch.empty_like, stacks))
    calls = [(orthogonaliser(copy), copy) for copy in copies]

    def prepare() -> None:
        for copy, stack in zip(copies, stacks, strict=True):
            copy.copy_(stack)

    def run() -> None:
        for call, copy in calls:
            call(copy)

    for _ in range(2):
        prepare()
        run()
    milliseconds = median(step_times(run, seconds, stacks[0].device, prepare=prepare))
    num_matrices = sum(map(len, stacks))
    num_flops = sum(len(stack) * newton_schulz_flops(tuple(stack.shape[1:])) for stack in stacks)
    rate = num_flops / milliseconds / 1e9
    return NewtonSchulz(model, num_matrices, num_flops, milliseconds, rate, rate / matrix_tflop_s)
