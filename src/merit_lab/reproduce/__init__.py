"""Figures and tables of the paper, each by one command, with verdicts that are computed."""

from merit_lab.reproduce.entry import Entry, Result, Unavailable
from merit_lab.reproduce.registry import ENTRIES
from merit_lab.reproduce.scales import SCALES
from merit_lab.reproduce.verdict import Comparison, Verdict
from merit_lab.reproduce.work import Task, reproduce

__all__ = [
    "ENTRIES",
    "SCALES",
    "Comparison",
    "Entry",
    "Result",
    "Task",
    "Unavailable",
    "Verdict",
    "reproduce",
]
