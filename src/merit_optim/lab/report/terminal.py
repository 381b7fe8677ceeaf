"""The table of outcomes in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from merit_optim.lab.report.outcome import SeriesOutcome
from merit_optim.lab.report.tables import series_table

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    "Optimizer",
    "Runs",
    "Peak learning rate",
    "Validation loss",
    "Largest logit at the end",
)


def print_outcomes(outcomes: Sequence[SeriesOutcome], console: Console) -> None:
    """Print one row for each series, in eighty columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    content = series_table(outcomes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, name in enumerate(content.head):
        if name in _COLUMNS:
            # Heads wrap at their words, cells do not.
            width = max(map(len, [*name.split(), *(row[place] for row in content.rows)]))
            side: Literal["left", "right"] = "left" if place < content.num_text else "right"
            table.add_column(Text(name), justify=side, width=width)
    for row in content.rows:
        cells = [cell for name, cell in zip(content.head, row, strict=True) if name in _COLUMNS]
        table.add_row(*(Text(cell, style="red" if "diverged" in cell else "") for cell in cells))
    console.print(table)
