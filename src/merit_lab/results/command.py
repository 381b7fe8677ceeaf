"""`merit report`: make a page, charts and tables from runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

_IN_A_TERMINAL = ("Series", "Runs", "Validation loss", "Largest logit at the end")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit report",
        description="Make a page from training runs, with its charts as SVG and its tables as Markdown.",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them at any depth")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report"),
        help="folder to write into (report); it must be empty or hold an earlier report",
    )
    options = parser.parse_args(argv)

    from merit_lab.results.page import check_folder
    from merit_lab.results.report import outcome, report
    from merit_lab.runs import find, table
    from merit_lab.tables import print_table

    try:
        check_folder(options.out)  # before reading runs, which may take long
        find.say_what_is_left_out("merit report", options.runs)
        page = report(table.read(*options.runs))
        path = page.write(options.out)
    except (OSError, ValueError) as error:
        print(f"merit report: {error}", file=sys.stderr)
        return 1
    assert page.runs is not None
    for alike in page.runs.partition_by("conditions", maintain_order=True):
        print_table(outcome(alike).only(_IN_A_TERMINAL))
    for warning in page.warnings:
        print(f"merit report: {warning}", file=sys.stderr)
    print(f"\n{page.summary}\nThe page: {path}")
    return 0
