"""Observe attention functions of Hugging Face models that do not call torch's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from merit_optim.monitor.arguments import AttentionArguments, of_eager, of_flash
from merit_optim.monitor.interception import Interception

_open: list[Interception] = []
"""The active interceptions. They end in any order, so the registry is changed once for all of them."""


@contextmanager
def intercepted_registry(interception: Interception) -> Iterator[None]:
    """Make transformers' registry return observed attention functions.

    That is "eager" and the flash kernels; others call a function of torch, which is observed anyway. The name
    of the function, by which models choose their masks, does not change.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:  # never imported, so the model is not from transformers
        yield
        return
    registry = transformers.AttentionInterface
    if not _open:
        _intercept(registry)
    _open.append(interception)
    try:
        yield
    finally:
        _open.remove(interception)
        if not _open:
            registry.get_interface = registry.get_interface.__wrapped__


def _intercept(registry: Any) -> None:
    original = registry.get_interface

    @functools.wraps(original)
    def get_interface(self: Any, name: str | None, default: Callable[..., Any]) -> Any:
        attend = original(self, name, default)
        for interception in _open:
            if name == "eager":
                attend = _observed(attend, of_eager, interception)
            elif name is not None and "flash" in name:
                attend = _observed(attend, of_flash, interception)
        return attend

    registry.get_interface = get_interface


def _observed(
    attend: Callable[..., Any],
    arguments_of: Callable[..., AttentionArguments | None],
    interception: Interception,
) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        if interception.path:
            interception.observe(arguments_of(*args, **kwargs))
        return attend(*args, **kwargs)

    return observed
