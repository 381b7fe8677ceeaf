"""Grids of learning rates and other settings: run, and the best values shown between their neighbours."""

from merit_lab.sweep.ledger import Best, Cell, Ledger, Line
from merit_lab.sweep.work import sweep

__all__ = ["Best", "Cell", "Ledger", "Line", "sweep"]
