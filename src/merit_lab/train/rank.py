"""Which process prints under torchrun. Does not import torch."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints for all."""
    return os.environ.get("RANK", "0") == "0"
