"""The kinds of a model's parameters, in the form that tests compare."""

import re

from torch import nn

from merit_optim.optim.kinds import KINDS, kinds_of


def by_kind(model: nn.Module) -> dict[str, str]:
    """The names of each kind's parameters, with # for numbers, in the order of the model."""
    kinds, names = kinds_of(model), {}
    for name, param in model.named_parameters():
        names.setdefault(re.sub(r"\d+", "#", name), set()).add(kinds[param])
    assert all(len(kinds) == 1 for kinds in names.values()), names
    return {
        kind: " ".join(name for name, kinds in names.items() if kinds == {kind})
        for kind in KINDS
        if {kind} in names.values()
    }


def kind_of(model: nn.Module, name: str) -> str:
    return kinds_of(model)[model.get_parameter(name)]


def expected(**names: str) -> dict[str, str]:
    """The result of ``by_kind``, written over several lines."""
    return {kind: " ".join(names[kind].split()) for kind in KINDS if kind in names}
