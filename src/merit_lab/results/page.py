"""The page of a report or a study: facts, a summary, and sections of text, tables and charts.

    index.html      one file that needs no other, no network and no JavaScript
    figures/*.svg   each chart
    table.md        each table
    table.csv       a row a run, if the page has runs

Example:
    >>> import polars as pl, tempfile
    >>> table = pl.DataFrame({"Optimizer": ["AdamW"], "Loss": [3.25]})
    >>> page = Page("AdamW", summary="AdamW ended at 3.25.", sections=[Section("Losses", table)])
    >>> print((page.write(Path(tempfile.mkdtemp())).parent / "table.md").read_text())
    Losses
    <BLANKLINE>
    | Optimizer | Loss |
    | --- | ---: |
    | AdamW | 3.25 |
    <BLANKLINE>
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from merit_lab.folders import refuse_file, writing_into
from merit_lab.results.names import clean, readable
from merit_lab.runs import durable
from merit_lab.runs.table import flat
from merit_lab.tables import NOTHING, Table

_MARK = '<meta name="generator" content="merit-optim'
_HEAD = 2000  # characters of a page that contain the mark
_PARTIAL = re.compile(r"(\..*|index\.html\.\w+\.partial)")  # hidden, or left by a process that was killed
_LONGEST_CELL = 300


@dataclass(frozen=True)
class Chart:
    """A picture: the name of its file, what stands above and below it on a page, and its SVG."""

    name: str
    title: str
    caption: str
    svg: str

    def write(self, folder: Path) -> Path:
        """Write NAME.svg, which can be read on a light and on a dark page; return its path."""
        path = folder / f"{self.name}.svg"
        path.write_text(self.svg, encoding="utf-8")
        return path


Content = str | Chart | Table | pl.DataFrame


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it: text, tables and charts; `code` in text in backquotes.

    Charts that follow each other stand side by side where there is room. A ``folded`` section shows its
    heading alone until it is clicked.
    """

    title: str
    content: Content | Sequence[Content]
    caption: str = ""
    folded: bool = False

    @property
    def parts(self) -> list[Content]:
        """What stands below the heading."""
        one = isinstance(self.content, str | Chart | Table | pl.DataFrame)
        return [self.content] if one else list(self.content)  # type: ignore[list-item, arg-type]


@dataclass(frozen=True)
class Page:
    """A page, in the order in which it shows its parts.

    ``runs``, the frame of runs or a part of it, becomes table.csv; ``warnings`` stand out above the sections.
    """

    title: str
    facts: Sequence[str] = ()
    summary: str = ""
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    runs: pl.DataFrame | None = field(default=None, repr=False)
    back: tuple[str, str] | None = None
    """The address and the name of the page that this one belongs to."""

    @property
    def charts(self) -> list[Chart]:
        """All charts."""
        return [part for section in self.sections for part in section.parts if isinstance(part, Chart)]

    def html(self) -> str:
        """The page as text."""
        import jinja2
        from markupsafe import Markup

        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("merit_lab.results", ""),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "text": lambda text: Markup(_with_code(readable(text))),
            "name": clean,
            "by_kind": _by_kind,
            "as_table": as_table,
        }
        return environment.get_template("page.html").render(page=self, files=self._files())

    def markdown(self) -> str:
        """All tables in Markdown."""
        tables = [
            f"{html.escape(clean(section.title), quote=False)}\n\n{as_table(part).markdown()}"
            for section in self.sections
            for part in section.parts
            if isinstance(part, Table | pl.DataFrame)
        ]
        return "\n".join(tables)

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, in place of those of an earlier page; return the page's path."""
        check_folder(folder)
        with writing_into(folder):
            figures = folder / "figures"
            figures.mkdir(parents=True, exist_ok=True)
            # The page first: it marks the folder, so that a part of a report can be replaced.
            page = folder / "index.html"
            durable.write(page, self.html())
            for path in figures.glob("*.svg"):
                path.unlink()  # of an earlier page, which may have had others
            for chart in self.charts:
                chart.write(figures)
            (folder / "table.md").write_text(self.markdown(), encoding="utf-8")
            if self.runs is not None:
                flat(self.runs).write_csv(folder / "table.csv")
        return page

    def _files(self) -> dict[str, str]:
        files = {"table.md": "the tables in Markdown"}
        if self.runs is not None:
            files["table.csv"] = "a row for each run"
        return {"figures/": "each chart as SVG", **files} if self.charts else files


def check_folder(folder: Path) -> None:
    """Raise if a folder is a file, or holds files but no page of ours; call it before long work."""
    refuse_file(folder)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if not all(map(_PARTIAL.fullmatch, names)) and not _is_ours(folder / "index.html"):
        raise FileExistsError(
            f"{folder} holds files that merit did not write and will not overwrite; choose another folder "
            "with --out, or move them away"
        )


def as_table(content: Table | pl.DataFrame) -> Table:
    """A table as text; of a frame, the columns of numbers are the last ones.

    Example:
        >>> as_table(pl.DataFrame({"name": ["a", "b"], "value": [0.123456, 1e6]})).rows
        (('a', '0.1235'), ('b', '1e+06'))
    """
    if isinstance(content, Table):
        head, rows, num_text = content.head, content.rows, content.num_text
    else:
        is_number = content.schema.dtypes()
        texts = [name for name, kind in zip(content.columns, is_number, strict=True) if not kind.is_numeric()]
        numbers = [name for name in content.columns if name not in texts]
        head, num_text = (*texts, *numbers), len(texts)
        rows = tuple(tuple(map(_cell, row)) for row in content.select(head).rows())
    cells = tuple(tuple(clean(cell, _LONGEST_CELL) for cell in row) for row in rows)
    return Table(tuple(map(clean, head)), cells, num_text)


def _cell(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _by_kind(parts: Iterable[Content]) -> list[tuple[str, list[Content]]]:
    """The parts of a section, neighbours of one kind together: text, charts, tables."""

    def kind(part: Content) -> str:
        return "text" if isinstance(part, str) else "charts" if isinstance(part, Chart) else "tables"

    return [(name, list(alike)) for name, alike in itertools.groupby(parts, kind)]


def _with_code(text: str) -> str:
    return re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(text))


def _is_ours(page: Path) -> bool:
    """Whether merit wrote this page, according to its head."""
    if not page.is_file():
        return False
    with page.open(encoding="utf-8", errors="replace") as file:
        return _MARK in file.read(_HEAD)
