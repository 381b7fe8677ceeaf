"""Text to token files, and token files to batches.

Names that need torch are loaded on first use, so that `merit prepare` starts at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from merit_lab.data.batches import Batches, validation_sequences
from merit_lab.data.tokens import Dataset, TokenFile

if TYPE_CHECKING:
    from merit_lab.data.prefetch import Prefetcher

__all__ = ["Batches", "Dataset", "Prefetcher", "TokenFile", "validation_sequences"]


def __getattr__(name: str) -> Any:
    if name == "Prefetcher":
        from merit_lab.data.prefetch import Prefetcher

        return Prefetcher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
