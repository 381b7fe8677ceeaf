"""Tables of text: in Markdown, and in a terminal."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

NOTHING = "\u2013"  # a dash
_GAP = 3  # between columns in a terminal


@dataclass(frozen=True)
class Table:
    """A head and rows of the same length; the first ``num_text`` columns are text, the rest numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_text: int = 1

    def only(self, names: Sequence[str]) -> Table:
        """The table with only these columns."""
        places = [place for place, name in enumerate(self.head) if name in names]
        return Table(
            tuple(self.head[place] for place in places),
            tuple(tuple(row[place] for place in places) for row in self.rows),
            num_text=sum(place < self.num_text for place in places),
        )

    def markdown(self) -> str:
        """The table in Markdown, with numbers right-aligned."""
        rule = ["---" if place < self.num_text else "---:" for place in range(len(self.head))]
        lines = [self.head, rule, *self.rows]
        # Names come from users: neither a cell nor HTML may begin or end in one.
        escaped = [
            [html.escape(cell.replace("\\", r"\\"), quote=False).replace("|", r"\|") for cell in line]
            for line in lines
        ]
        return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


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
