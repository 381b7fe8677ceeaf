"""Report on runs: one self-contained HTML page, SVG files and CSV files."""

from merit_lab.report.gather import find_runs
from merit_lab.report.outcome import read_outcomes
from merit_lab.report.series import group
from merit_lab.report.summary import summarise
from merit_lab.report.write import Report

__all__ = [
    "Report",
    "find_runs",
    "group",
    "read_outcomes",
    "summarise",
]
