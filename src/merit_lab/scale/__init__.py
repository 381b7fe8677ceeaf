"""How far a larger batch saves steps: measured, and fitted by a curve with a critical batch."""

from merit_lab.scale.fit import Estimate, ScalingCurve, fit_curve
from merit_lab.scale.rules import Rule, rates_by_batch
from merit_lab.scale.work import scale
from merit_lab.study.reach import steps_to_reach

__all__ = [
    "Estimate",
    "Rule",
    "ScalingCurve",
    "fit_curve",
    "rates_by_batch",
    "scale",
    "steps_to_reach",
]
