"""An experimental variant of MERIT: ratios for parts of a weight, and ratios smoothed over steps.

A direct implementation of the definition, one weight at a time: for experiments, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions.adam import moments, quotient
from merit_optim.optim.axes.holds import Decay
from merit_optim.optim.axes.ratios import Merit, Sizes
from merit_optim.optim.axes.ratios.ratio import sizes
from merit_optim.optim.matrices import matrices_of


class MERITVariant(Optimizer):
    """MERIT with ratios for blocks of rows, or ratios averaged over steps.

    Args beside those of MERIT:
        rows: split a matrix into blocks of this many rows and treat each as a separate weight: with the
            width of an attention head, one block for each head. None: no split.
        smoothing: decay of the moving averages that replace the update's norms; 0: no averaging.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-6,
        weight_decay: float = 0.1,
        *,
        rows: int | None = None,
        smoothing: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "rows": rows, "smoothing": smoothing})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step; ``closure`` recomputes the loss, as in torch's optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, ratio, seen = self.state[weight], Merit(), matrices_of(weight.shape)
        if group["rows"] is not None and not seen.is_vector:
            seen = seen._replace(num=seen.num * seen.rows // group["rows"], rows=group["rows"])
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        averages = moments(state["exp_avg"], state["exp_avg_sq"], grad, *group["betas"])
        state["exp_avg"], state["exp_avg_sq"] = averages
        update = Decay().inside(quotient(*averages, group["eps"]), weight, group["weight_decay"])
        weight_NRC, update_NRC = weight.view(seen.shape), update.view(seen.shape)
        weight_sizes, update_sizes = (
            sizes(x_NRC, ratio, is_vector=seen.is_vector) for x_NRC in (weight_NRC, update_NRC)
        )
        if group["smoothing"]:
            update_sizes = _smoothed(update_sizes, state, group["smoothing"])
        scale = ratio.scale(*algorithm.ratios_of(weight_sizes, update_sizes))
        weight_NRC.sub_(ratio.clipped(update_NRC * scale) * group["lr"])


def _smoothed(now: Sizes, state: dict[str, Any], decay: float) -> Sizes:
    """Moving averages of the norms, starting from the first step's."""
    for name, size in now._asdict().items():
        if size is not None:
            before = state.get(name)
            state[name] = size if before is None else torch.lerp(before, size, 1 - decay)
    return Sizes(state.get("rows_NR"), state.get("columns_NC"), state["whole_N"])
