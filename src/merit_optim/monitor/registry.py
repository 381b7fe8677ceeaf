"""The attention functions of Hugging Face models that end in no function of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from merit_optim.monitor.arguments import Arguments, of_eager, of_flash
from merit_optim.monitor.interception import Interception


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
    original = registry.get_interface

    def get_interface(self: Any, name: str | None, default: Callable[..., Any]) -> Any:
        attend = original(self, name, default)
        if name == "eager":
            return _observed(attend, of_eager, interception)
        if name is not None and "flash" in name:
            return _observed(attend, of_flash, interception)
        return attend

    registry.get_interface = get_interface
    try:
        yield
    finally:
        registry.get_interface = original


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
