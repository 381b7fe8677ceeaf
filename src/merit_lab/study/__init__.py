"""Studies: questions that training runs answer, and the code that trains those runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from

if TYPE_CHECKING:
    from merit_lab.study.runner import carry_out
    from merit_lab.study.study import Conclusion, Findings, Round, Study, conduct, run_study
    from merit_lab.study.trial import Trial

__all__ = ["Conclusion", "Findings", "Round", "Study", "Trial", "carry_out", "conduct", "run_study"]

_OF_STUDY = ("Conclusion", "Findings", "Round", "Study", "conduct", "run_study")
__getattr__ = load_from(
    __name__, {**dict.fromkeys(_OF_STUDY, "study"), "Trial": "trial", "carry_out": "runner"}
)
