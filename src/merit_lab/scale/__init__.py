"""Steps to a target loss against the batch size, and a fit of the critical batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.scale.fit import Estimate, ScalingCurve, fit_curve
    from merit_lab.scale.rules import RateRule, rates_by_batch
    from merit_lab.scale.work import scale

__all__ = ["Estimate", "RateRule", "ScalingCurve", "fit_curve", "rates_by_batch", "scale"]

__getattr__ = load_from(
    __name__,
    {
        "Estimate": "fit",
        "RateRule": "rules",
        "ScalingCurve": "fit",
        "fit_curve": "fit",
        "rates_by_batch": "rules",
        "scale": "work",
    },
)
