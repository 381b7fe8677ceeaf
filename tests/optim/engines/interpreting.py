"""A faster Triton interpreter, without most of its overhead of milliseconds per program."""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from triton.runtime import interpreter

from merit_optim.optim.engines.fused import layout

CHUNK = layout.CHUNK.value


def patch_once() -> None:
    """Replace the kernels' language by the interpreter's once, for the whole process.

    Triton does so in every launch, and in every call of a function in a kernel. It also checks for integer
    overflows, which only matters for debugging.
    """
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda _: None
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def chunks_of(num_tiles: int) -> Any:
    """Use chunks of another length: with sixteen, most programs are idle here, and still take time."""
    return mock.patch.object(layout.CHUNK, "value", num_tiles)
