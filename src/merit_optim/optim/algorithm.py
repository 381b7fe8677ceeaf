"""The definition: a step of this family for one tensor, in plain torch. Every engine is tested against it.

A weight w with gradient g:

    d, state <- direction(g, state)       Adam's, Muon's or SOAP's: see directions/
    u  = d + weight_decay*w
    b  = |w| / |u|                        over the whole weight
    r_i = |w_i.| / |u_i.|  per row        c_j = |w_.j| / |u_.j|  per column
    s_ij = max(r_i, c_j, b)               and within ``ratio_bounds``; b / b_first if ``calibrated``
    w <- w - lr * clamp(s*u, -clip, clip)

|.| is the largest magnitude (``norm="max"``) or the Euclidean length (``norm="l2"``). With ``norm="none"``
s is 1. With Adam's direction and every part switched on, this is MERIT. ``Rule`` switches off single parts,
down to LAMB and AdamW.

No function changes its arguments, so autograd and ``torch.compile`` can trace them. The engines in
``engines/`` compute the same in place, in pieces, or in one kernel, and their tests compare with this file.

Shape suffixes: N stacked matrices, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.directions import Direction
from merit_optim.optim.matrices import View

Norm = Literal["max", "l2", "none"]
NORMS: tuple[Norm, ...] = ("max", "l2", "none")


class Rule(NamedTuple):
    """The options that define the ratios. The paper's ablations, LAMB and AdamW are values of it."""

    clip: float | None = 1.0
    element_wise: bool = True
    weight_bound: bool = True
    norm: Norm = "max"
    ratio_bounds: tuple[float, float] | None = None
    """The smallest and the largest ratio."""
    calibrated: bool = False
    """Divide the ratio by its first value. Needs one ratio for the whole weight."""

    @staticmethod
    def of(group: dict[str, Any]) -> Rule:
        """Return the rule that a parameter group's options describe."""
        return Rule(**{name: group[name] for name in Rule._fields if name in group})

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the rule's state tensors, which follow the direction's."""
        return ("first_ratio",) if self.calibrated else ()

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The bounds of s. Where there are no ratios, there is nothing to bound."""
        return None if self.norm == "none" else self.ratio_bounds

    @property
    def has_rows(self) -> bool:
        """Whether rows and columns have their own ratios."""
        return self.element_wise and self.norm != "none"


UNSCALED = Rule(clip=None, element_wise=False, weight_bound=False, norm="none")
"""s = 1 and no clip: with Adam's direction AdamW, with Muon's Muon."""


class Sizes(NamedTuple):
    """The norms of all rows, columns and whole matrices. Vectors have only the last."""

    rows_NR: Tensor | None
    columns_NC: Tensor | None
    whole_N: Tensor


def decayed(d: Tensor, weight: Tensor, weight_decay: float) -> Tensor:
    """Return u, the update before any ratio."""
    # A product and a sum instead of add(alpha=...): their rounding does not depend on an element's place in
    # memory, so sharded and whole tensors give the same bits.
    return d + weight * weight_decay


def sizes(x_NRC: Tensor, rule: Rule, *, is_vector: bool) -> Sizes:
    """Return the norms that the ratios need. Rows and columns only if the rule uses them."""

    def size(*dims: int) -> Tensor:
        if rule.norm == "max":
            return x_NRC.abs().amax(dims)
        sum_sq = x_NRC.square().sum(dims)
        is_zero = sum_sq == 0  # there the root has no derivative, which ``differentiable`` would make NaN
        return sum_sq.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)

    if rule.norm == "none":  # a ratio of zeros is 1
        return Sizes(None, None, x_NRC.new_zeros(x_NRC.shape[0]))
    whole_N = size(1, 2)
    if is_vector or not rule.element_wise:
        return Sizes(None, None, whole_N)
    return Sizes(size(2), size(1), whole_N)


def undefined(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Mark the undefined ratios: those of a weight or an update of size zero."""
    return (weight_size == 0) | (update_size == 0)


def ratio(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Return |w| / |u|, or 1 where it is undefined."""
    no_ratio = undefined(weight_size, update_size)
    return defined_ratio(weight_size, update_size.masked_fill(no_ratio, 1)).masked_fill(no_ratio, 1)


def defined_ratio(weight_size: Tensor, update_size: Tensor) -> Tensor:
    """Return |w| / |u|, but at most the largest float, because inf * 0 is NaN."""
    quotient = weight_size / update_size
    return quotient.clamp(max=torch.finfo(quotient.dtype).max)


def element_ratio(weight: Sizes, update: Sizes, rule: Rule) -> Tensor:
    """Return s in a shape that broadcasts to (N, R, C).

    Elements whose row or column has an undefined ratio are not scaled (s = 1). Otherwise the ratios of other
    rows and columns would scale a zero-initialised row, and could keep it at zero. The one ratio of a vector
    or of a whole weight is 1 where it is undefined, and is bounded like any other.
    """
    whole = bounded(ratio(weight.whole_N, update.whole_N)[:, None, None], rule)
    if weight.rows_NR is None or weight.columns_NC is None:
        return whole
    assert update.rows_NR is not None and update.columns_NC is not None
    rows = ratio(weight.rows_NR, update.rows_NR)[:, :, None]
    columns = ratio(weight.columns_NC, update.columns_NC)[:, None, :]
    scale = torch.maximum(rows, columns)
    if rule.weight_bound:
        scale = torch.maximum(scale, whole)
    scale = bounded(scale, rule)
    unscaled_rows = undefined(weight.rows_NR, update.rows_NR)[:, :, None]
    unscaled_columns = undefined(weight.columns_NC, update.columns_NC)[:, None, :]
    return scale.masked_fill(unscaled_rows | unscaled_columns, 1)


def relative_to_first(weight: Sizes, update: Sizes, first_N11: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ratio relative to the first one, and the first one. Zero stands for none yet.

    An undefined ratio is 1, and is not the first one.
    """
    no_ratio_N11 = undefined(weight.whole_N, update.whole_N)[:, None, None]
    now_N11 = ratio(weight.whole_N, update.whole_N)[:, None, None]
    first_N11 = torch.where((first_N11 == 0) & ~no_ratio_N11, now_N11, first_N11)
    return now_N11 / first_N11.masked_fill(no_ratio_N11, 1), first_N11


def bounded(scale: Tensor, rule: Rule) -> Tensor:
    """Clamp s to the rule's bounds."""
    return scale if rule.bounds is None else scale.clamp(*rule.bounds)


def apply(weight: Tensor, update: Tensor, scale: Tensor, lr: float | Tensor, clip: float | None) -> Tensor:
    """Return w - lr * clamp(s*u), the last line of the definition."""
    scaled = update * scale
    if clip is not None:
        scaled = scaled.clamp(-clip, clip)
    return weight - scaled * lr


class Result(NamedTuple):
    """A weight and its state after a step."""

    weight: Tensor
    state: tuple[Tensor, ...]


def step(
    weight: Tensor,
    grad: Tensor,
    state: Sequence[Tensor],
    *,
    direction: Direction,
    rule: Rule,
    lr: float | Tensor,
    weight_decay: float,
    view: View = View(),  # noqa: B008  # a tuple
    step: float | Tensor = 1,
) -> Result:
    """Return one tensor and its state after a step, its ``step``-th.

    ``state`` has the tensors that the direction and the rule declare. Computed in float32 (float64 for
    float64 weights). The state keeps its dtype, and u is formed from the state as stored.
    """
    if weight.numel() == 0:
        return Result(weight, tuple(state))
    dtype, shape = compute_dtype(weight), weight.shape
    tensors = (view.cut(x, shape) for x in (weight.to(dtype), grad.to(dtype), *state))
    results = [
        matrix_step(
            weight_NRC,
            grad_NRC,
            state_of_each,
            direction=direction,
            rule=rule,
            lr=lr,
            weight_decay=weight_decay,
            step=step,
            is_vector=matrices.is_vector,
        )
        for matrices, weight_NRC, grad_NRC, *state_of_each in zip(
            view.split_matrices(shape), *tensors, strict=True
        )
    ]
    new_weight = view.joined([result.weight for result in results], weight)
    new_state = (view.joined([result.state[i] for result in results], old) for i, old in enumerate(state))
    return Result(new_weight.to(weight.dtype), tuple(new_state))


def matrix_step(
    weight_NRC: Tensor,
    grad_NRC: Tensor,
    state: Sequence[Tensor],
    *,
    direction: Direction,
    rule: Rule,
    lr: float | Tensor,
    weight_decay: float,
    step: float | Tensor,
    is_vector: bool,
) -> Result:
    """Return N matrices, each with its own direction and ratios, and their state after a step."""
    of_direction, of_rule = tuple(state[: len(direction.keys)]), tuple(state[len(direction.keys) :])
    d_NRC, of_direction = direction.advance(grad_NRC, of_direction, step)
    if d_NRC is None:
        return Result(weight_NRC, (*of_direction, *of_rule))
    update_NRC = decayed(d_NRC, weight_NRC, weight_decay)
    weight_sizes, update_sizes = (sizes(x, rule, is_vector=is_vector) for x in (weight_NRC, update_NRC))
    if rule.calibrated:
        (old_first_N11,) = of_rule
        old_N11 = old_first_N11.to(weight_NRC.dtype)  # float64 state would make the step one in float64
        relative_N11, first_N11 = relative_to_first(weight_sizes, update_sizes, old_N11)
        of_rule = (first_N11.to(old_first_N11.dtype),)
        scale = bounded(relative_N11, rule)
    else:
        scale = element_ratio(weight_sizes, update_sizes, rule)
    return Result(apply(weight_NRC, update_NRC, scale, lr, rule.clip), (*of_direction, *of_rule))


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 for float64 weights, else float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32
