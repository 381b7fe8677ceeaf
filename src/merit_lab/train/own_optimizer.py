"""Optimizers by name, also those from outside: torch:NAME, pytorch-optimizer:NAME or MODULE:CLASS."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.optim import Optimizer


_SHORT_NAMES = {"torch": "torch.optim", "pytorch-optimizer": "pytorch_optimizer"}


# Classes that can be made, and cannot step the models here: what they need, and what to take in their place.
_NEEDS = {
    "SparseAdam": (
        "sparse gradients, as of nn.Embedding(sparse=True), and those of a model here are dense",
        "torch:Adam",
    ),
    "LoRARite": ("pairs of LoRA's factors, and a model here has whole matrices", "pytorch-optimizer:SOAP"),
}


def is_own(name: str) -> bool:
    """Whether a name means a class from outside, as in "my_package.optimizers:Mine"."""
    return ":" in name


def must_be_trusted(name: str) -> bool:
    """Whether a name means a class of a module that anyone may have written: to import it is to run it."""
    return is_own(name) and name.partition(":")[0] not in (*_SHORT_NAMES, *_SHORT_NAMES.values())


def check_name(field: str, name: str) -> None:
    """Raise unless this is MODULE:CLASS. Nothing is imported: a record can be read without the module."""
    module, _, cls = name.partition(":")
    parts = _SHORT_NAMES.get(module, module).split(".")
    if not cls.isidentifier() or not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"{field} is {name!r}; an optimizer of your own is named by its module and its class, as in "
            "my_package.optimizers:Mine; others are torch:NAME and pytorch-optimizer:NAME"
        )


def class_of(name: str) -> Callable[..., Optimizer]:
    """What makes an optimizer that was named, of this package or from outside."""
    from merit_optim.optim.registry import OPTIMIZERS  # with torch, which names alone do not need

    return load_class(name) if is_own(name) else OPTIMIZERS[name].optimizer


def load_class(name: str) -> type[Optimizer]:
    """The class of a name; upper and lower case do not matter where there is but one."""
    check_name("the optimizer", name)
    short, _, class_name = name.partition(":")
    module_name = _SHORT_NAMES.get(short, short)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = "install the module, or set PYTHONPATH to its folder"
        if module_name == "pytorch_optimizer":
            way_out = "pip install '.[optim]' installs it"
        raise ValueError(f"the optimizer is {name!r}, but {error}; {way_out}") from error
    found = getattr(module, class_name, None)
    if found is None:
        found = _by_lower_case(module).get(class_name.lower())
    if not _is_optimizer(found):
        known = list(_by_lower_case(module).values())
        what = "nothing of that name" if found is None else f"{found!r}, which is no torch.optim.Optimizer"
        names = [own.__name__ for own in known]
        nearest = difflib.get_close_matches(class_name, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"the optimizer is {name!r}, but {module_name} has {what}; its optimizers are {names}{hint}"
        )
    return found


def is_by_others(cls: type) -> bool:
    """Whether a class is one of torch or pytorch_optimizer."""
    return cls.__module__.startswith(tuple(f"{module}." for module in _SHORT_NAMES.values()))


def check_needs(cls: Callable[..., Any]) -> None:
    """Raise where a class is known to need what no model here has."""
    if isinstance(cls, type) and is_by_others(cls) and cls.__name__ in _NEEDS:
        needs, instead = _NEEDS[cls.__name__]
        raise ValueError(f"{cls.__name__} needs {needs}; choose another, as {instead}")


def _by_lower_case(module: ModuleType) -> dict[str, type[Optimizer]]:
    return {key.lower(): value for key, value in vars(module).items() if _is_optimizer(value)}


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    from torch.optim import Optimizer

    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def construct(
    make: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any], name: str
) -> Optimizer:
    """An optimizer over parameter groups, with options that it must take."""
    try:
        optimizer = make(groups, **options)
    except TypeError as error:
        raise ValueError(
            f"{name} could not be made with parameter groups and {', '.join(options)}: {error}; it must take "
            "these: betas where optimizer.betas is given, and what optimizer.options names. What it misses "
            "is given there too"
        ) from error
    except Exception as error:  # whatever a class from outside raises
        if not is_own(name):
            raise
        raise ValueError(
            f"{name} refuses what it is given, parameter groups and {', '.join(options)}: {error}. If it is "
            "for matrices alone, name another for the rest, as in --optimizer.rest adamw"
        ) from error
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"{name} has no lr in its parameter groups, where the schedule sets it; choose another"
        )
    return optimizer
