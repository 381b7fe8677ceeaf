"""Convert text to token files, and token files to batches.

Names that need torch are loaded on first use, so that `merit prepare` starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.data.batches import Batches, check_validation_size, validation_sequences
from merit_lab.data.tokens import Dataset, TokenFile
from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.data.device import DeviceBatches

__all__ = [
    "Batches",
    "Dataset",
    "DeviceBatches",
    "TokenFile",
    "check_validation_size",
    "validation_sequences",
]

__getattr__ = load_from(__name__, {"DeviceBatches": "device"})
