"""Which process speaks, where torchrun started several. Imports no torch."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is the one of those that torchrun started which speaks for all."""
    return os.environ.get("RANK", "0") == "0"
