"""Reproduce figures and tables of the paper, each with one command and a computed verdict."""

from merit_lab.reproduce.entry import Analysis, PaperEntry, Unavailable
from merit_lab.reproduce.registry import ENTRIES
from merit_lab.reproduce.scales import SCALES
from merit_lab.reproduce.verdict import ClaimComparison, Verdict
from merit_lab.reproduce.work import Task, reproduce

__all__ = [
    "ENTRIES",
    "SCALES",
    "Analysis",
    "ClaimComparison",
    "PaperEntry",
    "Task",
    "Unavailable",
    "Verdict",
    "reproduce",
]
