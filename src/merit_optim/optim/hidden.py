"""Optimizers with one direction for hidden matrices and Adam's for the rest, such as Muon and SOAP.

Hidden matrices are recognized by their kind in the model (``kinds.py``), never by shape alone: embeddings and
output heads are matrices too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim import validate
from merit_optim.optim.algorithm import UNSCALED, Rule
from merit_optim.optim.directions import Adam, Direction
from merit_optim.optim.groups import picked
from merit_optim.optim.kinds import KINDS, Kind
from merit_optim.optim.options import ENGINE_DEFAULTS, EngineOptions
from merit_optim.optim.trust import TrustRatioOptimizer

_ADAM = Adam(betas=(0.9, 0.95), eps=1e-8, bias_correction=True).options
ADAMW: dict[str, Any] = {**_ADAM, **UNSCALED._asdict()}
"""AdamW expressed in this family's options."""


class HiddenMatrixOptimizer(TrustRatioOptimizer):
    """Base class of optimizers with separate options for hidden matrices and for the rest.

    Parameter groups come from ``param_groups(model)``, which adds the kind of each weight, or they set their
    ``direction``. If groups are sorted by kind, at least one weight must be a hidden matrix. Groups that all
    set their direction need none: a pipeline stage may have no hidden matrix.
    """

    DIRECTED_KINDS: ClassVar[tuple[Kind, ...]] = ("hidden", "experts")
    """The kinds of weights that use the optimizer's direction."""
    REST_SHARE: ClassVar[float] = 1.0
    """The default learning rate of the rest, as a fraction of ``lr``."""

    _has_sorted = False
    """Whether a group was sorted by kind because it did not set its direction."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | Tensor,
        weight_decay: float,
        direction: Direction,
        rule: Rule,
        rest_lr: float | Tensor | None,
        rest: Mapping[str, Any] | None,
        **options: Unpack[EngineOptions],
    ) -> None:
        for name, value in options.items():
            if name in _ADAM:
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}. It is an "
                    "option of the rest (embeddings, heads and vectors), which has Adam's direction: "
                    f"rest={{{name!r}: {value!r}}}"
                )
        validate.learning_rate(lr)
        if rest_lr is not None and rest and "lr" in rest:
            raise ValueError(f"rest_lr is {rest_lr} and rest has lr {rest['lr']}; give one of them")
        if rest_lr is None:
            rest_lr = lr * self.REST_SHARE
        validate.learning_rate(rest_lr, "rest_lr")
        validate.rest(rest, {*ADAMW, *ENGINE_DEFAULTS, "weight_decay", "lr"})
        self._rest = {**ADAMW, "lr": rest_lr, **(rest or {})}
        super().__init__(params, lr=lr, weight_decay=weight_decay, direction=direction, rule=rule, **options)
        name = self.defaults["direction"]
        if self._has_sorted and all(group["direction"] != name for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__} was given no weight to use direction={name!r} for: none is of the "
                f"kind {' or '.join(map(repr, self.DIRECTED_KINDS))}. Set kinds with param_groups(model, "
                "kinds={'*.my_layer.*': 'hidden'}); print(describe_groups(param_groups(model))) shows how "
                "weights are sorted. If this is a pipeline's stage without layers, set direction='adam' in "
                "its groups."
            )

    def _known_options(self) -> Collection[str]:
        return {*super()._known_options(), *self._rest}

    def _sorted(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Split a group into those for hidden matrices, for stacked matrices and for the rest."""
        if "direction" in group:
            is_rest = group["direction"] == self._rest["direction"] != self.defaults["direction"]
            return super()._sorted({**self._rest, **group} if is_rest else group)
        if "param_kinds" not in group:
            raise ValueError(
                f"{type(self).__name__} uses one direction for hidden matrices and another for embeddings, "
                "heads and vectors, and parameters alone do not tell which is which. Use "
                f"{type(self).__name__}(param_groups(model), lr=...), or set "
                f"direction={self.defaults['direction']!r} or 'adam' in every group."
            )
        for option in ("rest", "rest_lr"):
            if option in group:
                name = type(self).__name__
                raise ValueError(
                    f"a parameter group has {option!r}, an option for all weights but hidden "
                    f"matrices. Pass it to the optimizer: {name}(groups, {option}=...)."
                )
        params = group["params"]
        group = {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
        validate.kinds_of_group(group["param_kinds"], len(group["params"]), KINDS)
        self._has_sorted = True
        options: dict[str, dict[str, Any]] = {"whole": {}, "stacked": {"matrix_dims": 2}, "rest": self._rest}
        members: dict[str, list[int]] = {role: [] for role in options}
        for i, (kind, param) in enumerate(zip(group["param_kinds"], group["params"], strict=True)):
            members[self._role(kind, param)].append(i)
        if members["rest"] and "weight_decay" in self._rest and "weight_decay" in group:
            raise ValueError(
                f"rest has weight_decay={self._rest['weight_decay']}, and a group has its own, "
                f"{group['weight_decay']}. Set it there: param_groups(model, weight_decay=..., "
                "overrides={'*embedding*': {'weight_decay': ...}})."
            )
        by_role = [options[role] | picked(group, numbers) for role, numbers in members.items() if numbers]
        return list(chain.from_iterable(map(super()._sorted, by_role)))

    def _role(self, kind: Kind, param: Tensor) -> str:
        """Whether a weight is one matrix, a stack of matrices, or of the rest."""
        if kind not in self.DIRECTED_KINDS:
            return "rest"
        # The leading 1 of an embedding is a batch: the matrix is behind it.
        is_stack = kind == "experts" or (kind == "embedding" and param.ndim > 2 and param.shape[0] == 1)
        return "stacked" if is_stack else "whole"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rest": self._rest}
