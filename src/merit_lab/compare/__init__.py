"""Several optimizers and seeds with one configuration: run, tabulated and reported."""

from merit_lab.compare.plan import plan
from merit_lab.compare.work import compare

__all__ = ["compare", "plan"]
