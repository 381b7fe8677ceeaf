"""Launch Triton kernels with little host time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Kernel:
    """A Triton kernel with its grid.

    After the first call it is launched through its compiled handle: looking it up by its arguments would cost
    the host more than everything else in a step.
    """

    def __init__(self, function: Any, num_programs: int, **constants: Any) -> None:
        self._function, self._grid, self._constants = function, (num_programs, 1, 1), constants
        self._known: dict[tuple[bool, ...], tuple[Callable[..., None], list[Any]]] = {}

    def __call__(self, *args: Any, **flags: bool) -> None:
        key = tuple(flags.values())
        if key in self._known:
            start, constants = self._known[key]
            start(*args, *constants)
            return
        named = self._constants | flags
        handle = self._function[self._grid](*args, **named)
        if handle is not None:  # Triton's interpreter has none
            constants = [named[name] for name in self._function.arg_names[len(args) :]]
            self._known[key] = handle[self._grid], constants
