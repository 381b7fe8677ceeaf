"""Names of parameters and modules without those that wrappers add."""

from __future__ import annotations

COMPILED = "_orig_mod"
"""The name of the original module in a module made by torch.compile."""


def plain(name: str) -> str:
    """The name before torch.compile.

    Examples:
        >>> plain("blocks.0._orig_mod.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)
