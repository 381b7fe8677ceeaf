"""Several optimizers and seeds with one configuration: run, tabulated and reported."""

from merit_lab.compare.plan import PlannedRun, plan
from merit_lab.compare.work import carry_out, compare

__all__ = ["PlannedRun", "carry_out", "compare", "plan"]
