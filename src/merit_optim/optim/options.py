"""The options of a step that all optimizers share: their types, defaults and checks."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from merit_optim.optim import validate
from merit_optim.optim.kind_options import KindOptions
from merit_optim.optim.kinds import KINDS
from merit_optim.optim.matrices import Split
from merit_optim.spelling import did_you_mean, nearest

NonFinite = Literal["propagate", "skip", "raise"]
NONFINITE: tuple[NonFinite, ...] = ("propagate", "skip", "raise")

# Only dtypes with at least float32's exponent range: squares of typical gradients underflow in float16.
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

WHOLE_STEP = ("max_grad_norm", "nonfinite")
"""Options of the whole step, which must be equal in all groups."""

_RATES = {"lr", "rate_scale"}
_SCHEDULED = {*_RATES, "betas", "momentum", "weight_decay"}
"""Options that schedules change in every step. What a parameter needs does not depend on them."""

_KEYS_OF_TORCH = {"params", "param_names", "initial_lr"}


class StepOptions(TypedDict, total=False):
    """Options of every optimizer; see ``MERIT`` for their meaning."""

    kinds: KindOptions | None
    state_dtype: torch.dtype
    nonfinite: NonFinite
    max_grad_norm: float | None
    maximize: bool
    capturable: bool
    differentiable: bool


class EngineOptions(StepOptions, total=False):
    """Options of the trust-ratio family: how a weight is viewed as matrices, and which engine updates it."""

    matrix_dims: int | None
    split: Split
    split_dim: int | None
    transposed: bool
    foreach: bool | None
    fused: bool | None


STEP_DEFAULTS = StepOptions(
    kinds=None,
    state_dtype=torch.float32,
    nonfinite="propagate",
    max_grad_norm=None,
    maximize=False,
    capturable=False,
    differentiable=False,
)
ENGINE_DEFAULTS = EngineOptions(
    **STEP_DEFAULTS,
    matrix_dims=None,
    split=None,
    split_dim=None,
    transposed=False,
    foreach=None,
    fused=None,
)


_NAMES_ELSEWHERE = {
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping", "gradient_clip_val"), "'max_grad_norm'"),
    **dict.fromkeys(
        ("rate_scale", "lr_scale", "rest", "rest_lr", "adam_lr", "adamw_lr", "embed_lr"),
        "kinds={'embedding': {'rate_scale': ...}, ...}",
    ),
    "learning_rate": "'lr'",
    "wd": "'weight_decay'",
}
"""What others call an option. By its letters "grad_clip" is nearest to ``clip``, which clips no gradients."""


def filled(owner: type, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with defaults for the missing ones."""
    arguments = inspect.signature(owner).parameters.values()
    named = [argument.name for argument in arguments if argument.kind is not argument.VAR_KEYWORD]
    check_arguments(owner.__name__, options, {*named, *defaults})
    return {**defaults, **options}


def check_arguments(owner: str, options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an unknown argument, as a call does, with the nearest name."""
    for name in options:
        if name not in known:
            meant = _NAMES_ELSEWHERE.get(name) or next(map(repr, nearest(name, sorted(known))), None)
            hint = f"Did you mean {meant}?" if meant else f"help({owner}) says what it takes."
            raise TypeError(f"{owner}.__init__() got an unexpected keyword argument {name!r}. {hint}")


def rate(group: Mapping[str, Any]) -> float | Tensor:
    """``lr * rate_scale``, the rate of a group's step; on the device of an ``lr`` in a tensor, unread."""
    lr: float | Tensor = group["lr"]
    scale: float = group["rate_scale"]
    return lr if scale == 1 else lr * scale


def check_step(group: Mapping[str, Any]) -> None:
    """Raise if an option that all optimizers have is not allowed."""
    validate.learning_rate(group["lr"])
    validate.at_least_zero("rate_scale", group["rate_scale"])
    validate.at_least_zero("weight_decay", group["weight_decay"])
    if "kind" in group:
        validate.one_of("kind", group["kind"], KINDS)
    validate.one_of("nonfinite", group["nonfinite"], NONFINITE)
    validate.one_of("state_dtype", group["state_dtype"], STATE_DTYPES)
    if group["max_grad_norm"] is not None:
        validate.positive("max_grad_norm", group["max_grad_norm"], "None for no clipping")
    for option in ("maximize", "capturable", "differentiable"):
        validate.flag(option, group[option])


def check_engine(group: Mapping[str, Any]) -> None:
    """Raise if an option of the family's engines is not allowed, or excludes another."""
    validate.optional_count("matrix_dims", group["matrix_dims"])
    validate.split("split", group["split"])
    if group["split_dim"] is not None:
        validate.one_of("split_dim", group["split_dim"], (0, 1))
    validate.flag("transposed", group["transposed"])
    for option in ("foreach", "fused"):
        if group[option] is not None:
            validate.flag(option, group[option], ", or None")
    for option, other in (("fused", "foreach"), ("fused", "differentiable"), ("foreach", "differentiable")):
        if group[option] and group[other]:
            raise ValueError(f"{option}=True and {other}=True exclude each other; choose one")


def check_alike(group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
    """Raise if groups differ in an option of the whole step."""
    for option in WHOLE_STEP:
        for other in others:
            if other[option] != group[option]:
                raise ValueError(
                    f"parameter groups have {option}={other[option]!r} and {group[option]!r}; it must be "
                    "equal for the whole step. Pass it to the optimizer, not to a group."
                )


def check_names(owner: str, group: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise if an option looks misspelt. Other keys are left to the user, as in torch's optimizers."""
    for key in group.keys() - known - _KEYS_OF_TORCH:
        if hint := did_you_mean(key, known, otherwise="", similarity=0.85):
            raise ValueError(f"a parameter group has {key!r}, which {owner} does not know{hint}")


class Watch:
    """Checks options that were changed in ``param_groups``, before a step uses them.

    Options are compared by identity, because most steps change none. Those that can be changed in place are
    compared by value: lists, and learning rates in tensors, except on a device that would need a sync.
    """

    def __init__(self) -> None:
        self._allowed: Sequence[Any] = ()
        """The options of all groups when they last passed the checks."""
        self._lists: Sequence[tuple[list[Any], list[Any]]] = ()
        """The lists among them, which can be changed in place, each with a copy."""

    def check(
        self,
        groups: list[dict[str, Any]],
        check_group: Callable[[dict[str, Any]], None],
        check_parameters: Callable[[int], None],
    ) -> bool:
        """Call ``check_group`` for each group if an option has changed, and ``check_parameters`` if need be.

        There may be thousands of parameters, and schedules change options in every step. Returns whether
        another option than the rates has changed.
        """
        values = list(itertools.chain.from_iterable(map(dict.values, groups)))
        same = len(values) == len(self._allowed) and all(map(operator.is_, values, self._allowed))
        lists_are_same = all(now == before for now, before in self._lists)
        if same and lists_are_same:
            for group in groups:
                if isinstance(group["lr"], Tensor) and group["lr"].is_cpu:
                    validate.learning_rate(group["lr"])
            return False
        keys = list(itertools.chain.from_iterable(groups))
        pairs = itertools.zip_longest(keys, values, self._allowed)
        changed = {key for key, now, before in pairs if now is not before}
        on_device = any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups)
        if on_device and torch.cuda.is_current_stream_capturing():
            return True  # nothing can be read during capture; the next step checks again
        for index, group in enumerate(groups):
            if changed <= _RATES and lists_are_same:
                validate.learning_rate(group["lr"])
                validate.at_least_zero("rate_scale", group["rate_scale"])
                continue
            check_group(group)
            if not (changed <= _SCHEDULED and lists_are_same):
                check_parameters(index)
        check_alike(groups[0], groups)
        self._allowed = values
        self._lists = [
            (value, copy.deepcopy(value))
            for key, value in zip(keys, values, strict=True)
            if isinstance(value, list) and key not in _KEYS_OF_TORCH
        ]
        return not (changed <= _RATES and lists_are_same)
