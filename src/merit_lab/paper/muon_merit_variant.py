"""An experimental variant of MuonMERIT: weight decay elsewhere, smoothed ratios, SOAP's direction later.

A direct implementation of the definition, one weight at a time: for experiments, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_lab.paper.merit_variant import smoothed_sizes
from merit_optim import MuonMERIT
from merit_optim.optim import algorithm
from merit_optim.optim.algorithm import Rule
from merit_optim.optim.directions import Muon, Soap, direction_of
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Item, Work, count_step, update_each
from merit_optim.optim.matrices import View

Decay = Literal["inside", "outside", "cautious"]


class MuonMERITVariant(MuonMERIT):
    """MuonMERIT with another weight decay, with smoothed ratios, or with SOAP's direction after some steps.

    Args:
        params: parameter groups from ``param_groups(model)``.
        lr: learning rate of the hidden matrices.
        weight_decay: see ``decay``.
        decay: where the decay of hidden matrices acts. "inside": ``u = d + weight_decay*w``, as in
            MuonMERIT. "outside": ``u = d``, and ``w <- w - lr*weight_decay*w`` beside it, as in AdamW.
            "cautious": inside, for the elements that d makes smaller in any case.
        smoothing: decay of the moving averages that replace the update's norms; 0: no averaging.
        soap_after: number of steps after which hidden matrices take SOAP's direction, whose state begins then
            and whose first step changes nothing; None: never. Only without the two above.
        options: those of MuonMERIT.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        weight_decay: float = 0.1,
        *,
        decay: Decay = "inside",
        smoothing: float = 0.0,
        soap_after: int | None = None,
        **options: Any,
    ) -> None:
        if decay not in get_args(Decay):
            raise ValueError(f"decay is {decay!r}, but must be one of {', '.join(get_args(Decay))}")
        if soap_after is not None and (decay != "inside" or smoothing):
            raise ValueError(
                f"soap_after is {soap_after}, and decay is {decay!r} and smoothing {smoothing}, which SOAP's "
                "direction does not have here; use soap_after=None, or leave the others at their defaults"
            )
        self._decay, self._smoothing, self._soap_after = decay, smoothing, soap_after
        super().__init__(params, lr, weight_decay, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._soap_after is not None and self._num_steps() >= self._soap_after:
            for group in self.param_groups:
                if group["direction"] == Muon.NAME:
                    group.update(Soap().options)
                    for param in group["params"]:
                        self.state.pop(param, None)
        return super().step(closure)

    def _num_steps(self) -> float:
        """The steps so far, as the rest counts them; Muon's direction has no count."""
        return max((float(state["step"]) for state in self.state.values() if "step" in state), default=0.0)

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        hidden = [work for work in works if work.group["direction"] == Muon.NAME]
        rest = [work for work in works if work.group["direction"] != Muon.NAME]
        super()._update(rest, controls, sharding)
        count_step(hidden, controls)
        update_each(hidden, controls, self._definition)

    def _definition(self, item: Item, weight: Tensor, grad: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        group, rule = item.group, Rule.of(item.group)
        lr, weight_decay = group["lr"], group["weight_decay"]
        seen = View.of(group).matrices(weight.shape)
        weight_NRC, grad_NRC = weight.view(seen.shape), grad.view(seen.shape)
        in_parts = tuple(x.view(seen.shape) if x.shape == weight.shape else x for x in state)
        d_NRC, in_parts = direction_of(group).advance(grad_NRC, in_parts, item.step)
        assert d_NRC is not None
        if self._decay == "outside":
            update_NRC = d_NRC
        elif self._decay == "cautious":
            shrinks = d_NRC * weight_NRC > 0
            update_NRC = algorithm.decayed(d_NRC, weight_NRC.where(shrinks, 0), weight_decay)
        else:
            update_NRC = algorithm.decayed(d_NRC, weight_NRC, weight_decay)
        update_sizes = algorithm.sizes(update_NRC, rule, is_vector=False)
        if self._smoothing:
            update_sizes = smoothed_sizes(update_sizes, self.state[item.original], self._smoothing)
        weight_sizes = algorithm.sizes(weight_NRC, rule, is_vector=False)
        scale = algorithm.element_ratio(weight_sizes, update_sizes, rule)
        new_NRC = algorithm.apply(weight_NRC, update_NRC, scale, lr, rule.clip)
        if self._decay == "outside":
            new_NRC = new_NRC - weight_NRC * (lr * weight_decay)
        return new_NRC.view_as(weight), *(x.view_as(old) for x, old in zip(in_parts, state, strict=True))
