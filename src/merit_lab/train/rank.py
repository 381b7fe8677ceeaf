"""Which process prints under torchrun. Does not import torch."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints for all."""
    return os.environ.get("RANK", "0") == "0"


def raised_on_all(error: Exception) -> Exception:
    """Return an error that every rank raises, marked so that one of them reports it."""
    error.on_all_ranks = True  # type: ignore[attr-defined]
    return error


def is_reported_here(error: Exception) -> bool:
    """Whether this process is to report an error: its own, or as the first rank one of all."""
    return is_first_rank() or not getattr(error, "on_all_ranks", False)
