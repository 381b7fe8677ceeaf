"""Grids of learning rates and other settings: run, and the best values shown between their neighbours."""

from merit_lab.sweep.ledger import Best, Cell, Ledger, Line
from merit_lab.sweep.work import sweep
from merit_lab.sweep.write import Findings

__all__ = ["Best", "Cell", "Findings", "Ledger", "Line", "sweep"]
