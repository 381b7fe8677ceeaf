"""One direction for the hidden matrices of a model, and Adam's for the rest: what Muon and SOAP want.

Which weights are hidden matrices is decided by what they are in the model (``kinds.py``), never by shape: an
embedding and an output head have a row for each token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from merit_optim.optim import validate
from merit_optim.optim.algorithm import UNSCALED, Rule
from merit_optim.optim.directions import Adam, Direction
from merit_optim.optim.kinds import KINDS, Kind
from merit_optim.optim.options import ENGINE_DEFAULTS, EngineOptions
from merit_optim.optim.trust import TrustRatioOptimizer

ADAMW: dict[str, Any] = {
    **Adam(betas=(0.9, 0.95), eps=1e-8, bias_correction=True).options,
    **UNSCALED._asdict(),
}
"""The options of AdamW as a member of the family."""


class HiddenMatrixOptimizer(TrustRatioOptimizer):
    """Options for hidden matrices, and others for the rest of the weights.

    Parameter groups come from ``param_groups(model)``, which says what each weight is, or they say themselves
    which ``direction`` they take. Sorted by kinds, some weight must be a hidden matrix; groups that all say
    their directions need not have one, as a stage of a pipeline may not.
    """

    KINDS: ClassVar[tuple[Kind, ...]] = ("hidden", "experts")
    """The kinds of weights that take the optimizer's direction."""
    REST_SHARE: ClassVar[float] = 1.0
    """The learning rate of the rest, as a share of the other."""

    _has_sorted = False
    """Whether a group was sorted by kinds, and did not say its direction itself."""

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
        validate.learning_rate(lr)
        if rest_lr is None:
            rest_lr = lr * self.REST_SHARE
        validate.learning_rate(rest_lr, "rest_lr")
        validate.rest(rest, {*ADAMW, *ENGINE_DEFAULTS, "weight_decay", "lr"})
        self._rest = {**ADAMW, "lr": rest_lr, **(rest or {})}
        super().__init__(params, lr=lr, weight_decay=weight_decay, direction=direction, rule=rule, **options)
        own = self.defaults["direction"]
        if self._has_sorted and all(group["direction"] != own for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__} was given no weight to use direction={own!r} for: none is of the "
                f"kind {' or '.join(map(repr, self.KINDS))}. param_groups(model, "
                "kinds={'*.my_layer.*': 'hidden'}) names them; print(describe_groups(param_groups(model))) "
                "shows how weights are sorted."
            )

    def _known_options(self) -> Collection[str]:
        return {*super()._known_options(), *self._rest}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, sorted by what they are in the model."""
        num_before = len(self.param_groups)
        try:
            for group in self._sorted(param_group):
                super().add_param_group(group)
        except (TypeError, ValueError):
            del self.param_groups[num_before:]
            raise

    def _sorted(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A group as one for the hidden matrices, one for stacked ones and one for the rest."""
        if "direction" in group:
            is_rest = group["direction"] == self._rest["direction"] != self.defaults["direction"]
            return [{**self._rest, **group} if is_rest else group]
        if "param_kinds" not in group:
            raise ValueError(
                f"{type(self).__name__} has one direction for hidden matrices and another for embeddings, "
                "heads and vectors, and parameters alone do not say what they are. Write "
                f"{type(self).__name__}(param_groups(model), lr=...), or give every group "
                f"direction={self.defaults['direction']!r} or 'adam'."
            )
        params = group["params"]
        group = {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
        validate.kinds_of_group(group["param_kinds"], len(group["params"]), KINDS)
        self._has_sorted = True
        options: dict[str, dict[str, Any]] = {"hidden": {}, "experts": {"matrix_dims": 2}, "rest": self._rest}
        members: dict[str, list[int]] = {role: [] for role in options}
        for i, kind in enumerate(group["param_kinds"]):
            role = kind if kind == "experts" else "hidden"
            members[role if kind in self.KINDS else "rest"].append(i)
        return [options[role] | _picked(group, numbers) for role, numbers in members.items() if numbers]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rest": self._rest}


def _picked(group: dict[str, Any], members: list[int]) -> dict[str, Any]:
    """A group with some of its parameters."""
    lists = ("params", "param_names", "param_kinds")
    return {key: [value[i] for i in members] if key in lists else value for key, value in group.items()}
