"""The choices by name, those of this package and of its users.

    from merit_optim import Hold, register

    @register("mine")
    @dataclass(frozen=True, kw_only=True)
    class Mine(Hold):
        ...

A parameter group holds the name of its choice on each axis, and the options of all three by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from merit_optim.optim.axes.choice import Choice
from merit_optim.optim.matrices import View
from merit_optim.spelling import did_you_mean

C = TypeVar("C", bound=Choice)

AXES: Mapping[str, dict[str, type[Choice]]] = {"direction": {}, "ratio": {}, "hold": {}}

# Computed once: torch.compile cannot trace dataclasses.fields.
_OPTION_NAMES: dict[type[Choice], tuple[str, ...]] = {}

# Keys of a parameter group that mean something else, for all choices.
_RESERVED = {
    "params",
    "param_names",
    "lr",
    "weight_decay",
    "rate_scale",
    "kind",
    "algorithm",
    "foreach",
    "fused",
}
_RESERVED |= {"state_dtype", "nonfinite", "max_grad_norm", "maximize", "capturable", "differentiable"}
_RESERVED |= {*View._fields, *AXES}


def register(name: str) -> Callable[[type[C]], type[C]]:
    """A decorator: make a direction, a ratio or a hold known under a name.

    The class is a frozen dataclass, a subclass of ``Direction``, ``Ratio`` or ``Hold``. A class that is
    defined again, as in a notebook, replaces itself; a name that another class has is refused.
    """

    def registered(choice: type[C]) -> type[C]:
        known = AXES[_axis_of(name, choice)]
        other = known.get(name)
        if other is not None and _place(other) != _place(choice):
            raise ValueError(
                f"the {choice.AXIS} {name!r} is {_place(other)} already; give {_place(choice)} another name"
            )
        names = choice.option_names()
        if taken := _RESERVED & set(names):
            raise ValueError(
                f"{_place(choice)} has the options {sorted(taken)}, which mean something else in a parameter "
                "group; give them other names"
            )
        choice.NAME = name
        known[name], _OPTION_NAMES[choice] = choice, names
        return choice

    return registered


def _axis_of(name: str, choice: Any) -> str:
    is_choice = isinstance(choice, type) and issubclass(choice, Choice) and hasattr(choice, "AXIS")
    if not is_choice or "__dataclass_params__" not in vars(choice):
        raise TypeError(
            f"register({name!r}) takes a dataclass that is a subclass of Direction, Ratio or Hold, not "
            f"{choice!r}: put @dataclass(frozen=True, kw_only=True) below it"
        )
    axis: str = choice.AXIS
    return axis


def _place(choice: type[Choice]) -> str:
    return f"{choice.__module__}.{choice.__qualname__}"


def choice_class(axis: str, name: Any) -> type[Choice]:
    """The class of this name; raise ValueError if there is none."""
    known = AXES[axis]
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(str(name), known)
        raise ValueError(
            f"{axis} is {name!r}{hint} Known: {', '.join(map(repr, known))}. A choice of your own is known "
            "once the file with its @register was imported."
        )
    return known[name]


def chosen(group: Mapping[str, Any], axis: str) -> Any:
    """The choice that a parameter group's options describe."""
    choice = AXES[axis][group[axis]]
    return choice(**{option: group[option] for option in _OPTION_NAMES[choice] if option in group})


def all_options() -> set[str]:
    """The options of all choices."""
    return {option for names in _OPTION_NAMES.values() for option in names}


def owners_of(option: str) -> str:
    """The choices that have an option, as "direction='muon' or direction='sgd'"; empty if none has it."""
    known = ((axis, name, choice) for axis, choices in AXES.items() for name, choice in choices.items())
    return " or ".join(f"{axis}={name!r}" for axis, name, choice in known if option in _OPTION_NAMES[choice])


def option_names(group: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The options that a parameter group must have for its choices, each with the axis."""
    for axis, known in AXES.items():
        for option in _OPTION_NAMES[known[group[axis]]]:
            yield axis, option
