"""The ways to compute a trust-ratio step. All are held to ``algorithm.py``."""

from __future__ import annotations


def availability() -> dict[str, str | None]:
    """The engines, each with the reason why it cannot run here, or None if it can."""
    return {"eager": None, "fused": fused_unavailable()}


def fused_unavailable() -> str | None:
    """Why the fused engine cannot run, or None."""
    return "this version has no fused engine"
