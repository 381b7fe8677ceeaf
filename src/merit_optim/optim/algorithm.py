"""The definition: a step of this family for one tensor, in plain torch. Every engine is tested against it.

A weight w with gradient g takes a step by four choices, of which this file is the fourth, the engine:

    d, state <- direction(g, state)       Adam's, Muon's or SOAP's: see axes/directions/
    u  = hold.inside(d, w)                d + weight_decay*w, or d: see axes/holds/
    s  = ratio(sizes of w and u)          |w| / |u| of rows, columns and the whole: see axes/ratios/
    c  = clamp(s*u, -clip, clip)
    w <- hold.apply(w, c)                 w - lr*c, or what else keeps the weight's size

With Adam's direction, MERIT's ratios and decay inside, all of them the defaults, this is MERIT:

    u  = m / (sqrt(v) + eps) + weight_decay*w
    s_ij = max(max|w_i.| / max|u_i.|,  max|w_.j| / max|u_.j|,  max|w| / max|u|)
    w <- w - lr * clamp(s*u, -1, 1)

No function changes its arguments, so autograd and ``torch.compile`` can trace them. The engines in
``engines/`` compute the same in place, in pieces, or in one kernel, and their tests compare with this file.

Shape suffixes: N stacked matrices, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.holds import Move, Products
from merit_optim.optim.axes.ratios.ratio import Sizes, quotient, sizes, undefined
from merit_optim.optim.matrices import Extent
from merit_optim.optim.spec import Spec


class Result(NamedTuple):
    """A weight and its state after a step."""

    weight: Tensor
    state: tuple[Tensor, ...]


def step(
    weight: Tensor,
    grad: Tensor,
    state: Sequence[Tensor],
    *,
    spec: Spec,
    lr: float | Tensor,
    weight_decay: float,
    step: float | Tensor = 1,
) -> Result:
    """Return one tensor and its state after a step, its ``step``-th.

    ``state`` has the tensors that direction, ratio and hold declare. Computed in float32 (float64 for
    float64 weights). The state keeps its dtype, and u is formed from the state as stored.
    """
    if weight.numel() == 0:
        return Result(weight, tuple(state))
    dtype, shape, view = compute_dtype(weight), weight.shape, spec.view
    cut = [view.cut(x, shape) for x in (weight.to(dtype), grad.to(dtype), *state)]
    results = []
    for i, matrices in enumerate(view.split_matrices(shape)):
        weight_NRC, grad_NRC, *state_of_each = (parts[i] for parts in cut)
        results.append(
            matrix_step(
                weight_NRC,
                grad_NRC,
                state_of_each,
                spec=spec,
                lr=lr,
                weight_decay=weight_decay,
                step=step,
                is_vector=matrices.is_vector,
            )
        )
    new_weight = view.joined([result.weight for result in results], weight)
    new_state = (view.joined([result.state[i] for result in results], old) for i, old in enumerate(state))
    return Result(new_weight.to(weight.dtype), tuple(new_state))


def matrix_step(
    weight_NRC: Tensor,
    grad_NRC: Tensor,
    state: Sequence[Tensor],
    *,
    spec: Spec,
    lr: float | Tensor,
    weight_decay: float,
    step: float | Tensor,
    is_vector: bool,
) -> Result:
    """Return N matrices, each with its own direction, ratio and hold, and their state after a step."""
    direction, ratio, hold = spec.direction, spec.ratio, spec.hold
    of_direction, of_ratio, of_hold = spec.divided(state)
    dtypes = [x.dtype for x in state]
    # Wide state would make the step one in float64.
    of_ratio, of_hold = (tuple(x.to(weight_NRC.dtype) for x in some) for some in (of_ratio, of_hold))

    grad_NRC, of_hold = hold.before(grad_NRC, weight_NRC, of_hold)
    d_NRC, of_direction = direction.advance(grad_NRC, of_direction, step)
    if d_NRC is not None:
        update_NRC = hold.inside(d_NRC, weight_NRC, weight_decay)
        weight_sizes, update_sizes = (sizes(x, ratio, is_vector=is_vector) for x in (weight_NRC, update_NRC))
        ratios, no_ratios = ratios_of(weight_sizes, update_sizes)
        ratios, of_ratio = ratio.remember(ratios, no_ratios, of_ratio)
        change_NRC = ratio.clipped(update_NRC * ratio.scale(ratios, no_ratios))

        line_dim, (_, rows, columns) = hold.line_dim(spec.view), weight_NRC.shape
        products = None if line_dim is None else Products.of(weight_NRC, change_NRC, line_dim)
        move = Move(lr, weight_decay, Extent.whole(rows, columns), line_dim, step, products)
        weight_NRC, of_hold = hold.apply(weight_NRC, change_NRC, of_hold, move)

    new_state = (*of_direction, *of_ratio, *of_hold)
    return Result(weight_NRC, tuple(x.to(dtype) for x, dtype in zip(new_state, dtypes, strict=True)))


def ratios_of(weight: Sizes, update: Sizes) -> tuple[Sizes, Sizes]:
    """Return |w| / |u| of rows, columns and wholes, and which of them are undefined."""

    def each(form: Callable[[Tensor, Tensor], Tensor]) -> Sizes:
        whole_N = form(weight.whole_N, update.whole_N)
        if weight.rows_NR is None or weight.columns_NC is None:
            return Sizes(None, None, whole_N)
        assert update.rows_NR is not None and update.columns_NC is not None
        return Sizes(
            form(weight.rows_NR, update.rows_NR), form(weight.columns_NC, update.columns_NC), whole_N
        )

    return each(quotient), each(undefined)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 for float64 weights, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
