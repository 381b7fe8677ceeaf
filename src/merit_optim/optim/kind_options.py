"""Options for a kind of weight: ``kinds=``, an argument of every optimizer of this package.

    MuonMERIT(param_groups(model), kinds={"embedding": {"rate_scale": 20, "weight_decay": 0.0}})

They complete the groups of a kind as these are added. Afterwards a group has all of its options itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from merit_optim.optim import validate
from merit_optim.optim.kinds import KINDS, Kind
from merit_optim.spelling import did_you_mean

KindOptions = Mapping[Kind, Mapping[str, Any]]


def check(owner: str, kinds: Any, known: Collection[str]) -> None:
    """Raise if these are not options by kind that the optimizer knows."""
    if not isinstance(kinds, Mapping) or not all(isinstance(options, Mapping) for options in kinds.values()):
        raise TypeError(
            f"kinds is {kinds!r}; it must give options by kind, such as "
            "{'embedding': {'rate_scale': 20}}. What kind a weight is, param_groups(model, kind_of=...) says."
        )
    for kind, options in kinds.items():
        validate.one_of("a kind in kinds", kind, KINDS)
        if "lr" in options:
            raise ValueError(
                f"kinds sets lr={options['lr']!r} for {kind!r}, which schedules of the optimizer's lr would "
                f"not follow. Set the factor between the two: kinds={{{kind!r}: {{'rate_scale': ...}}}}"
            )
        for option in options.keys() - known:
            hint = did_you_mean(option, known, otherwise=f"; help({owner}) says which there are")
            raise ValueError(f"kinds sets {option!r} for {kind!r}, which {owner} does not know{hint}")


def completed(group: dict[str, Any], kinds: KindOptions) -> dict[str, Any]:
    """The group with the options of its kind, where it does not set them itself.

    Except for the weight decay, which every group of ``param_groups`` has: that of the kind is meant.
    """
    if not kinds:
        return group
    if "kind" not in group:
        raise ValueError(
            f"kinds has options for {', '.join(map(repr, kinds))}, and a parameter group does not say of "
            "which kind its weights are. Use param_groups(model), or set it in the group: {'params': ..., "
            "'kind': 'hidden'}"
        )
    of_kind = kinds.get(group["kind"], {})
    decay = {option: of_kind[option] for option in of_kind.keys() & {"weight_decay"}}
    return {**of_kind, **group, **decay}
