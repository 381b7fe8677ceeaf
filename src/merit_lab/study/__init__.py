"""A study: a question that training runs answer, and what carries out the runs."""

from merit_lab.study.runner import carry_out
from merit_lab.study.study import Round, Study, conduct
from merit_lab.study.trial import Trial

__all__ = ["Round", "Study", "Trial", "carry_out", "conduct"]
