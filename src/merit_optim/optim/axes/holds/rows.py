"""Each row as a magnitude times a direction, which learn apart: Muown, and AngularMuown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.axes.directions.adam import bias_correction, moments, quotient
from merit_optim.optim.axes.holds.hold import Hold, Move
from merit_optim.optim.axes.registered import register
from merit_optim.optim.axes.sums import sum_in_order
from merit_optim.optim.matrices import Matrices, View

State = tuple[Tensor, ...]


@register("rows")
@dataclass(frozen=True, kw_only=True)
class Rows(Hold):
    """w_i = magnitude_i * v_i / |v_i|: Adam for the magnitudes, the optimizer's direction for v.

        unit = w_i / magnitude_i                  along = <g_i, unit>
        g_i <- (g_i - along*unit) * magnitude_i / |v_i|            what the direction gets
        v_i <- unit*|v_i| - lr*c_i
        magnitude_i <- (magnitude_i - lr*adam(along)) * (1 - lr*weight_decay)

    With Muon's direction this is Muown (https://arxiv.org/abs/2605.10797). ``angular`` keeps |v_i| at 1, as
    AngularMuown does, so that ``lr`` is an angle at every time of a run.
    """

    NEEDS_MATRICES: ClassVar[bool] = True
    WHOLE_ROWS: ClassVar[bool] = True

    angular: bool = False
    magnitude_betas: tuple[float, float] = (0.9, 0.95)
    magnitude_eps: float = 1e-8
    transposed: bool = False

    def check(self) -> None:
        validate.flag("angular", self.angular)
        validate.betas(self.magnitude_betas)
        validate.epsilon(self.magnitude_eps, "1e-8")

    def refusal(self, view: View, shape: torch.Size) -> str | None:
        if self.transposed or (view.split is not None and view.split_dim):
            return "hold='rows' needs outputs as whole rows, and these are columns: use hold='sphere'"
        return None

    def blank(self, weight: Tensor) -> str | None:
        if weight.numel() and not weight.flatten(1).any(1).all():
            return "it has rows of zeros, which have no direction: initialise it (merit_optim.init_hidden)"
        return None

    @property
    def keys(self) -> tuple[str, ...]:
        return "magnitude", "length", "magnitude_exp_avg", "magnitude_exp_avg_sq"

    @property
    def keys_by_rows(self) -> tuple[str, ...]:
        return self.keys

    def shapes(self, matrices: Matrices, view: View) -> tuple[tuple[int, ...] | None, ...]:
        return ((matrices.num, matrices.rows, 1),) * len(self.keys)

    def before(self, grad_NRC: Tensor, weight_NRC: Tensor, state: State) -> tuple[Tensor, State]:
        magnitude, length, exp_avg, exp_avg_sq = state
        size = sum_in_order(weight_NRC.square(), 2).sqrt()
        is_new = magnitude == 0
        magnitude = torch.where(is_new, size, magnitude)
        length = torch.where(is_new, 1.0 if self.angular else size, length)
        unit_NRC = weight_NRC / magnitude
        along = sum_in_order(grad_NRC * unit_NRC, 2)
        exp_avg, exp_avg_sq = moments(exp_avg, exp_avg_sq, along, *self.magnitude_betas)
        grad_NRC = (grad_NRC - unit_NRC * along) * (magnitude / length)
        return grad_NRC, (magnitude, length, exp_avg, exp_avg_sq)

    def apply(self, weight_NRC: Tensor, change_NRC: Tensor, state: State, move: Move) -> tuple[Tensor, State]:
        magnitude, length, exp_avg, exp_avg_sq = state
        correction = bias_correction(move.step, *self.magnitude_betas)
        change = quotient(exp_avg, exp_avg_sq, self.magnitude_eps, correction)
        new_magnitude = (magnitude - change * move.lr) * (1 - move.lr * move.weight_decay)
        rows_NRC = weight_NRC * (length / magnitude) - change_NRC * move.lr
        new_length = sum_in_order(rows_NRC.square(), 2).sqrt()
        moved_NRC = rows_NRC * (new_magnitude / new_length)
        rests = (new_magnitude == magnitude) & ~(change_NRC * move.lr).any(2, keepdim=True)
        weight_NRC = torch.where(rests, weight_NRC, moved_NRC)
        new_length = torch.ones_like(length) if self.angular else torch.where(rests, length, new_length)
        return weight_NRC, (new_magnitude, new_length, exp_avg, exp_avg_sq)
