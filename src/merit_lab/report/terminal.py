"""Tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from merit_lab.report.outcome import SeriesOutcome
from merit_lab.report.tables import Table, series_table

_GAP = 3  # between columns
_OUTCOMES = (  # what fits into eighty columns
    "Optimizer",
    "Runs",
    "Peak learning rate",
    "Validation loss",
    "Bits per byte",
    "Largest logit at the end",
)


def print_outcomes(outcomes: Sequence[SeriesOutcome]) -> None:
    """Print one row for each series."""
    print_table(series_table(outcomes).only(_OUTCOMES))


def print_table(content: Table) -> None:
    """Print a table. Heads wrap at spaces; cells do not wrap and are never cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    total = 0
    for place, name in enumerate(content.head):
        width = max(map(len, [*name.split(), *(row[place] for row in content.rows)]))
        side: Literal["left", "right"] = "left" if place < content.num_text else "right"
        table.add_column(Text(name), justify=side, width=width)
        total += width + _GAP
    for row in content.rows:
        table.add_row(*(Text(cell, style="red" if "diverged" in cell else "") for cell in row))
    Console(width=max(total, Console().width)).print(table)
