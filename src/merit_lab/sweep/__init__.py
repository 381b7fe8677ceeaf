"""Train on grids of learning rates and other settings, and find the best values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.sweep.ledger import Best, Cell, Ledger, Line
    from merit_lab.sweep.work import sweep

__all__ = ["Best", "Cell", "Ledger", "Line", "sweep"]

__getattr__ = load_from(
    __name__, {"Best": "ledger", "Cell": "ledger", "Ledger": "ledger", "Line": "ledger", "sweep": "work"}
)
