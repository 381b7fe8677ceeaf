"""`merit report`: run directories become a page, figures and tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.report.gather import find_runs
from merit_lab.report.terminal import print_outcomes
from merit_lab.report.write import write_report


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit report",
        description="Make one self-contained HTML page from training runs, with its figures as SVG and its "
        "tables as Markdown and CSV.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders that hold some")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder to write into (report)")
    options = parser.parse_args(argv)
    try:
        report = write_report(find_runs(options.runs), options.out)
    except (OSError, ValueError) as error:
        print(f"merit report: {error}", file=sys.stderr)
        return 1
    print_outcomes(report.outcomes)
    print(f"\n{report.summary}\nThe page: {report.page}")
    return 0
