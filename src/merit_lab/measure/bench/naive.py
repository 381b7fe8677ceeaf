"""A naive MERIT: the paper's algorithm tensor by tensor, one operation at a time.

It shows the cost of an optimizer without engines, and is not meant for training.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class NaiveMERIT(Optimizer):
    """A direct transcription of the definition, with its defaults."""

    def __init__(self, params: ParamsT, lr: float = 9e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.95), "eps": 1e-6})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                state = self.state[w]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(w), torch.zeros_like(w)
                m, v, g = state["m"], state["v"], w.grad
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
                s = w.abs().max() / u.abs().max()
                if w.ndim == 2:
                    rows = w.abs().amax(1, keepdim=True) / u.abs().amax(1, keepdim=True)
                    columns = w.abs().amax(0, keepdim=True) / u.abs().amax(0, keepdim=True)
                    s = torch.maximum(torch.maximum(rows, columns), s)
                w.sub_(group["lr"] * (s * u).clamp(-1, 1))
