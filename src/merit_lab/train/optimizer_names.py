"""Find optimizers by name, including external ones: torch:NAME, pytorch-optimizer:NAME or MODULE:CLASS."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

from merit_optim.spelling import did_you_mean

if TYPE_CHECKING:
    from torch.optim import Optimizer


_SHORT_NAMES = {"torch": "torch.optim", "pytorch-optimizer": "pytorch_optimizer"}


def is_external(name: str) -> bool:
    """Whether a name means an external class, as in "my_package.optimizers:Mine"."""
    return ":" in name


def must_be_trusted(name: str) -> bool:
    """Whether a name means a class of an arbitrary module: importing it runs its code."""
    return is_external(name) and name.partition(":")[0] not in (*_SHORT_NAMES, *_SHORT_NAMES.values())


def check_name(field: str, name: str) -> None:
    """Raise ValueError unless this is MODULE:CLASS. Imports nothing, so records can be read without it."""
    module, _, cls = name.partition(":")
    parts = _SHORT_NAMES.get(module, module).split(".")
    if not cls.isidentifier() or not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"{field} is {name!r}; name your own optimizer by its module and class, as in "
            "my_package.optimizers:Mine; others are torch:NAME and pytorch-optimizer:NAME"
        )


def class_of(name: str) -> Callable[..., Optimizer]:
    """Return the class of an optimizer, from this package or external."""
    from merit_optim.optim.registry import OPTIMIZERS  # imports torch, which checking names does not need

    return load_class(name) if is_external(name) else OPTIMIZERS[name].optimizer


def load_class(name: str) -> type[Optimizer]:
    """Import the class of an external name; if there is no exact match, case is ignored."""
    check_name("the optimizer", name)
    short, _, class_name = name.partition(":")
    module_name = _SHORT_NAMES.get(short, short)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = "install the module, or set PYTHONPATH to its folder"
        if module_name == "pytorch_optimizer":
            way_out = "install it with pip install '.[optim]'"
        raise ValueError(f"the optimizer is {name!r}, but {error}; {way_out}") from error
    optimizer = getattr(module, class_name, None)
    if optimizer is None:
        optimizer = _by_lower_case(module).get(class_name.lower())
    if not _is_optimizer(optimizer):
        problem = (
            f"{module_name} has no such class"
            if optimizer is None
            else f"{optimizer!r} is not a torch.optim.Optimizer"
        )
        names = sorted(cls.__name__ for cls in _by_lower_case(module).values())
        hint = did_you_mean(class_name, names, otherwise=";")
        known = f"the optimizers of {module_name} are {', '.join(names)}" if names else "it has no optimizer"
        raise ValueError(f"the optimizer is {name!r}, but {problem}{hint} {known}")
    return optimizer


def is_from_library(cls: type) -> bool:
    """Whether a class is from torch or pytorch_optimizer."""
    return cls.__module__.startswith(tuple(f"{module}." for module in _SHORT_NAMES.values()))


def _by_lower_case(module: ModuleType) -> dict[str, type[Optimizer]]:
    return {key.lower(): value for key, value in vars(module).items() if _is_optimizer(value)}


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    from torch.optim import Optimizer

    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def construct(
    make: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any], name: str
) -> Optimizer:
    """Construct an optimizer from parameter groups and options; explain errors."""
    try:
        optimizer = make(groups, **options)
    except Exception as error:  # an external class may raise anything
        if not (is_external(name) or isinstance(error, TypeError)):
            raise
        raise ValueError(
            f"{name} refuses its arguments, parameter groups and {', '.join(options)}: {error}. Give missing "
            "ones in optimizer.options; if it supports only matrices, name another for the rest, as in "
            "--optimizer.rest adamw"
        ) from error
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"{name} has no lr in its parameter groups, which the schedule has to set; choose another"
        )
    return optimizer
