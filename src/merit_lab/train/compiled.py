"""The torch.compile cache when one process trains several runs."""

from __future__ import annotations

from functools import lru_cache

import torch

from merit_optim.optim.torch_private import allow_compiled_versions

# A run can need a version of its model for each way to observe it and each micro-batch size, and a few more
# for validation and Sophia-G.
_NUM_VERSIONS = 16


@lru_cache(maxsize=1)  # a second call with the same shapes does nothing
def begin_compiling_for(*shapes: object) -> None:  # noqa: ARG001 - the cache's key
    """Drop code that was compiled for other shapes; runs of the same shapes share it.

    By default torch.compile makes at most eight versions of a function. After that it only warns and runs
    uncompiled, many times slower. A process that trains one model after another soon reaches that limit.
    """
    allow_compiled_versions(_NUM_VERSIONS)
    torch.compiler.reset()
