"""What parameters and modules are called, whoever has wrapped them."""

from __future__ import annotations

COMPILED = "_orig_mod"
"""The name under which what torch.compile makes of a module has the module itself."""


def plain(name: str) -> str:
    """A name as it was before torch.compile.

    Examples:
        >>> plain("blocks.0._orig_mod.weight")
        'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED)
