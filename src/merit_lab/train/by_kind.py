"""Parameter groups for some kinds of weights, and options of kinds as configurations write them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from merit_lab.train.optimizer_options import class_of, default_of
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


def with_kinds(name: str, lr: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the class, with ``rest_lr`` as the ``rate_scale`` of the kinds that take AdamW.

    ``rest_lr`` is a rate of its own, as records have it.
    """
    cls = class_of(name)
    directed = cls.COMPOSITION.kinds if isinstance(cls, type) and issubclass(cls, Family) else None
    if "rest_lr" not in options or directed is None:
        return dict(options)
    peak = default_of(name, "lr") if lr is None else lr
    scale = {"rate_scale": options["rest_lr"] / peak}
    given = options.get("kinds", {})
    rest = {kind: scale | given.get(kind, {}) for kind in KINDS if kind not in directed}
    others = {option: value for option, value in options.items() if option != "rest_lr"}
    return {**others, "kinds": {**given, **rest}}
