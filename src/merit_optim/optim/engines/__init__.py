"""The engines: ways to compute a trust-ratio step. All must agree with ``algorithm.py``."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


def availability() -> dict[str, str | None]:
    """The engines, each with the reason why it cannot run on this machine, or None if it can."""
    return {"eager": None, "fused": fused_unavailable()}


def fused_unavailable() -> str | None:
    """Why the fused engine cannot run on this machine, or None."""
    if not _has_triton():
        return "triton is not installed; it comes with the CUDA builds of torch"
    if not torch.cuda.is_available() and not interpreting():
        return "torch sees no CUDA device"
    return None


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
