"""Optimizers from outside of this package, named as MODULE:CLASS."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer


def is_own(name: str) -> bool:
    """Whether a name means a class of the user's, as in "my_package.optimizers:Mine"."""
    return ":" in name


def check_name(name: str) -> None:
    """Raise unless this is MODULE:CLASS. Nothing is imported: a record can be read without the module."""
    module, _, cls = name.partition(":")
    if not cls.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(
            f"optimizer.name is {name!r}; an optimizer of your own is named by its module and its class, "
            "as in my_package.optimizers:Mine"
        )


def load_class(name: str) -> type[Optimizer]:
    """The class of a name."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"optimizer.name is {name!r}, but {error}; install the module, or set PYTHONPATH to its folder"
        ) from error
    found = getattr(module, class_name, None)
    if not _is_optimizer(found):
        known = [key for key, value in vars(module).items() if _is_optimizer(value)]
        what = "nothing of that name" if found is None else f"{found!r}, which is no torch.optim.Optimizer"
        raise ValueError(
            f"optimizer.name is {name!r}, but {module_name} has {what}; its optimizers are {known}"
        )
    return found


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    return isinstance(value, type) and issubclass(value, Optimizer)


def construct(
    make: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any], name: str
) -> Optimizer:
    """An optimizer over parameter groups, with options that it must take."""
    try:
        return make(groups, **options)
    except TypeError as error:
        raise ValueError(
            f"{name} could not be made with parameter groups and {', '.join(options)}: {error}; it must take "
            "these: betas where optimizer.betas is given, and what optimizer.options names"
        ) from error


def check_state(optimizer: Optimizer) -> None:
    """Raise where an optimizer that has taken a step keeps what no checkpoint can hold."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} in its state; "
                    "checkpoints hold tensors and numbers, so keep it elsewhere"
                )
