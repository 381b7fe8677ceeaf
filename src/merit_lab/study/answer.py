"""What the answers of studies share: how they are printed, a table of losses, what does not count."""

from __future__ import annotations

import math
import sys

import polars as pl

from merit_lab.results import statistic
from merit_lab.results.page import Page
from merit_lab.tables import Table, print_table


def show(page: Page, command: str) -> None:
    """Print the tables of the sections that are not folded, the caveats, and the answer."""
    for section in page.sections:
        for part in section.parts:
            if isinstance(part, Table) and not section.folded:
                print_table(part)
    for warning in page.warnings:
        print(f"{command}: {warning}", file=sys.stderr)
    print(f"\n{page.summary}")


def losses_table(runs: pl.DataFrame) -> Table:
    """A row for each series of runs, with the mean final loss of its seeds; the lowest first."""
    several = runs["conditions"].n_unique() > 1
    rows = []
    for (conditions, name), values in statistic.by_seed(runs).items():
        finite = [value for value in values.values() if math.isfinite(value)]
        lost = len(values) - len(finite)
        mean = math.fsum(finite) / len(finite) if finite and not lost else math.inf
        shown = f"{mean:.3f}" if math.isfinite(mean) else f"{lost} of {len(values)} diverged"
        rows.append((mean, (name, *([conditions] if several else []), shown, str(len(values)))))
    rows.sort(key=lambda row: row[0])
    head = ("Optimizer", *(["Conditions"] if several else []), "Validation loss", "Seeds")
    return Table(head, tuple(row for _, row in rows), num_text=1 + several)


def unfinished(runs: pl.DataFrame) -> list[str]:
    """A remark on the runs that do not count, if there are any."""
    left = runs.filter(pl.col("left_out").is_not_null())
    return [f"{row['run']} does not count: {row['left_out']}." for row in left.to_dicts()]
