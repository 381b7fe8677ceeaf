"""Report on runs: one self-contained HTML page, SVG files and CSV files."""

from merit_lab.results.gather import find_runs
from merit_lab.results.old_series import group
from merit_lab.results.outcome import read_outcomes
from merit_lab.results.summary import summarise
from merit_lab.results.write import Report

__all__ = [
    "Report",
    "find_runs",
    "group",
    "read_outcomes",
    "summarise",
]
