"""What torch.compile keeps from one run of a process to the next."""

from __future__ import annotations

from functools import lru_cache

import torch

# A run can need a version of its model for each way to observe it and each size of a micro-batch, and some
# more for validation and Sophia-G.
_NUM_VERSIONS = 16


@lru_cache(maxsize=1)  # so a call with the shapes of the call before does nothing
def begin_compiling_for(*shapes: object) -> None:  # noqa: ARG001 - the cache's key
    """Drop what was compiled for models or batches of other shapes; runs of the same shapes share it.

    torch.compile makes eight versions of a function by default. After that it goes on uncompiled, many
    times slower, with no more than a warning; a process that trains one model after the other gets there
    soon.
    """
    torch._dynamo.config.recompile_limit = max(_NUM_VERSIONS, torch._dynamo.config.recompile_limit)
    torch.compiler.reset()
