"""Train one configuration with several optimizers and seeds, and report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.compare.plan import plan
    from merit_lab.compare.work import compare

__all__ = ["compare", "plan"]

__getattr__ = load_from(__name__, {"compare": "work", "plan": "plan"})
