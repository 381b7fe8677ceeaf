"""Triton's interpreter without most of what it does around a kernel: a program of it takes milliseconds."""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

from triton.runtime import interpreter

from merit_optim.optim.engines.fused import kernels

CHUNK = kernels.CHUNK.value


def patch_once() -> None:
    """Have the kernels' language exchanged for the interpreter's once in this process, for good.

    Triton does so for each launch, and again for each call of a function within a kernel. It computes where
    integers overflow, too, for an assertion that it makes only when it is debugged.
    """
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda _: None
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def chunks_of(num_tiles: int) -> Any:
    """Chunks of another length: most programs of one of sixteen are idle here, and take their time too."""
    return mock.patch.object(kernels.CHUNK, "value", num_tiles)
