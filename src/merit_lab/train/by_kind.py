"""Parameter groups for some kinds of weights, and options of kinds as configurations write them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from merit_lab.train.optimizer_options import class_of
from merit_optim.optim.family import Family
from merit_optim.optim.kinds import KINDS, Kind

Groups = list[dict[str, Any]]


def of_kinds(groups: Groups, kinds: Collection[Kind]) -> Groups:
    """Return the parameter groups of these kinds."""
    return [group for group in groups if group["kind"] in kinds]


def merged(groups: Groups) -> Groups:
    """Return groups with equal options as one, for optimizers that do not know kinds; some take one group."""
    joined: dict[str, dict[str, Any]] = {}
    for group in groups:
        lists = {name: group[name] for name in ("params", "param_names")}
        options = {name: value for name, value in group.items() if name not in lists and name != "kind"}
        one = joined.setdefault(repr(sorted(options.items())), {**options, "params": [], "param_names": []})
        for name, values in lists.items():
            one[name] += values
    return list(joined.values())


def with_whole_rates(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return overrides of groups in which an ``lr`` is the rate itself, whatever the share of its kind."""
    return {
        pattern: {"rate_scale": 1.0, **options} if "lr" in options else dict(options)
        for pattern, options in overrides.items()
    }


def rest_of(name: str) -> dict[Kind, float]:
    """Return the kinds of weights that an optimizer gives to AdamW, each with its ``rate_scale``."""
    cls = class_of(name)
    if not (isinstance(cls, type) and issubclass(cls, Family)) or (own := cls.COMPOSITION.kinds) is None:
        return {}
    return {kind: cls.COMPOSITION.adamw.get("rate_scale", 1.0) for kind in KINDS if kind not in own}


def with_rate_scale(name: str, rate_scale: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which the kinds of ``rest_of`` have this ``rate_scale``, if they give none."""
    if rate_scale is None:
        return dict(options)
    given, rest = options.get("kinds", {}), rest_of(name)
    if not rest:
        raise ValueError(
            f"optimizer.rate_scale is {rate_scale:g}, but {name} gives no weights to AdamW; leave it out. "
            "For the rate of some weights use --optimizer.overrides, as in '*embedding*:lr=0.01'"
        )
    return {
        **options,
        "kinds": given | {kind: {"rate_scale": rate_scale} | given.get(kind, {}) for kind in rest},
    }
