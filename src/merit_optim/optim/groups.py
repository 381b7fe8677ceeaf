"""Rules that sort a model's parameters into groups: what decays, and what has options of its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from merit_optim.optim import validate

_NOT_OPTIONS = frozenset({"params", "param_names"})


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: Iterable[str] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: matrices decay, vectors and scalars do not.

    A frozen parameter is left out, a tied one stands once. Patterns are shell-style
    (``"*.bias"``), are matched against every name a parameter has, and must match something.

    Args:
        model: whose parameters to sort.
        weight_decay: of parameters with two or more dimensions.
        no_decay: patterns of further parameters without decay.
        overrides: options by pattern; where several patterns match, the later one wins.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10))
        >>> groups = param_groups(model, overrides={"0.*": {"element_wise": False}})
        >>> [(group["param_names"], group["weight_decay"]) for group in groups]
        [(['0.weight'], 0.1), (['1.weight'], 0.1), (['1.bias'], 0.0)]
    """
    overrides = {} if overrides is None else overrides
    no_decay = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    validate.model(model)
    validate.overrides(overrides)
    for pattern, override in overrides.items():
        if reserved := _NOT_OPTIONS & set(override):
            raise ValueError(
                f"the override for {pattern!r} sets {sorted(reserved)}; it may set options of the "
                "optimizer, such as lr, weight_decay or matrix_dims"
            )

    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    _check_patterns([*no_decay, *overrides], [name for alike in names.values() for name in alike])

    groups: dict[str, dict[str, Any]] = {}
    for param, alike in names.items():
        if not param.requires_grad:
            continue
        if is_lazy(param):  # it says that it has one dimension
            raise ValueError(
                f"{alike[0]} has no shape yet; whether it decays is known after one forward pass of the model"
            )
        decays = param.ndim >= 2 and not _matches(alike, no_decay)
        options: dict[str, Any] = {"weight_decay": weight_decay if decays else 0.0}
        for pattern, override in overrides.items():
            if _matches(alike, [pattern]):
                options.update(override)
        group = groups.setdefault(_key(options), {"params": [], "param_names": [], **options})
        group["params"].append(param)
        group["param_names"].append(alike[0])
    return list(groups.values())


def _key(options: dict[str, Any]) -> str:
    """Tells options apart; tensors by what they are, for each can be changed by itself."""
    told = [(name, id(value) if isinstance(value, Tensor) else value) for name, value in options.items()]
    return repr(sorted(told, key=lambda pair: pair[0]))


def _matches(names: list[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not _matches(names, [pattern]):
            nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ValueError(
                f"the pattern {pattern!r} matches no parameter; the nearest names are "
                f"{', '.join(nearest) or '(the model has no parameters)'}. Patterns are shell-style: "
                "'*.bias', 'blocks.0.*'."
            )
