"""A study: a question that training runs answer, and what carries out the runs."""

from merit_lab.study.runner import carry_out
from merit_lab.study.study import Conclusion, Findings, Round, Study, conduct, hold
from merit_lab.study.trial import Trial

__all__ = ["Conclusion", "Findings", "Round", "Study", "Trial", "carry_out", "conduct", "hold"]
