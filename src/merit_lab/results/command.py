"""`merit report`: make a page, figures and tables from run directories."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.results.gather import find_runs, say_what_is_left_out
from merit_lab.results.write import Report, refuse_folder


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit report",
        description="Make one self-contained HTML page from training runs, with its figures as SVG and its "
        "tables as Markdown and CSV.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them, also nested")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        help="folder to write into (report); it must be empty or hold an earlier report",
    )
    options = parser.parse_args(argv)
    try:
        refuse_folder(options.out)  # before reading runs, which may take long
        say_what_is_left_out("merit report", options.runs)
        report = Report.of(find_runs(options.runs))
        page = report.write(options.out)
    except (OSError, ValueError) as error:
        print(f"merit report: {error}", file=sys.stderr)
        return 1
    report.show()
    for warning in report.warnings:
        print(f"merit report: {warning}", file=sys.stderr)
    print(f"\n{report.summary}\nThe page: {page}")
    return 0
