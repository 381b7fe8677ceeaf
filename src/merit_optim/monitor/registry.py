"""The attention functions of Hugging Face models that end in no function of torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from merit_optim.monitor.arguments import Arguments, of_eager, of_flash
from merit_optim.monitor.interception import Interception

_open: list[Interception] = []
"""Those that observe what the registry hands out. They end in any order, so it is changed once for all."""


@contextmanager
def intercepted_registry(interception: Interception) -> Iterator[None]:
    """Let transformers' registry of attention functions hand out observed ones.

    That is "eager" and the flash kernels; others end in a function of torch, which is seen anyway. The name
    of the function, which models choose their masks by, stays as it is.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is None:  # never imported, so the model is none of its models
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
    arguments_of: Callable[..., Arguments | None],
    interception: Interception,
) -> Callable[..., Any]:
    def observed(*args: Any, **kwargs: Any) -> Any:
        if interception.path:
            interception.observe(arguments_of(*args, **kwargs))
        return attend(*args, **kwargs)

    return observed
