"""An entry as files (index.html, SVGs, table.csv, table.md, verdict.json), and the overview of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

from merit_lab.json_values import build, encode, read_object, with_nan
from merit_lab.paper.checks import Comparison, Outcome, worst
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.entry import Entry
from merit_lab.paper.quantities import best_rate
from merit_lab.paper.records import Data
from merit_lab.paper.scales import Scale
from merit_lab.results.page import Page, Section
from merit_lab.runs import durable
from merit_lab.tables import NOTHING, Table

_OVERVIEW = ("../index.html", "all figures and tables")
_HEADS = {
    "panel": "Model",
    "model": "Model",
    "series": "Optimizer",
    "batch": "Batch",
    "lr": "Peak learning rate",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a claim holds here."""

    claim: str
    source: str
    outcome: Outcome
    comparisons: tuple[Comparison, ...]

    @property
    def table(self) -> Table:
        """A row for each comparison."""
        rows = tuple((one.what, one.paper or NOTHING, one.words, one.outcome) for one in self.comparisons)
        return Table(("Comparison", "Paper", "Here", "Verdict"), rows, num_text=4)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of an entry: the content of verdict.json."""

    entry: str
    title: str
    scale: str
    outcome: Outcome
    """The worst of the verdicts'."""
    missing: str
    """Why it could not be made."""
    verdicts: tuple[Verdict, ...]

    @classmethod
    def read(cls, folder: Path) -> Result | None:
        """The result in an entry's folder; None if there is none."""
        path, way_out = folder / "verdict.json", f"remove it and make {folder.name} again; its runs are kept"
        if not path.exists():
            return None
        content = with_nan(read_object(path, way_out))
        try:
            return build(cls, content)
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); {way_out}") from None

    def write(self, folder: Path) -> None:
        """Write it into an entry's folder."""
        durable.write(folder / "verdict.json", encode(asdict(self), indent=2) + "\n")

    @property
    def says(self) -> str:
        """The claims; or why there is nothing to say of them."""
        return self.missing or " ".join(verdict.claim for verdict in self.verdicts)


@dataclass(frozen=True)
class Artefact:
    """An entry made from its runs, or the reason why it could not be made."""

    entry: Entry
    scale: Scale
    data: Data | None
    missing: str = ""

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """On each claim."""
        if self.data is None:
            return ()
        judged = [(claim, claim.compare(self.data, self.entry.paper)) for claim in self.entry.claims]
        return tuple(
            Verdict(
                claim=claim.says,
                source=claim.source or self.entry.source,
                outcome=worst(one.outcome for one in comparisons),
                comparisons=comparisons,
            )
            for claim, comparisons in judged
        )

    @property
    def result(self) -> Result:
        """The content of verdict.json."""
        return Result(
            entry=self.entry.name,
            title=self.entry.title,
            scale=self.scale.name,
            outcome=worst(verdict.outcome for verdict in self.verdicts),
            missing=self.missing,
            verdicts=self.verdicts,
        )

    def write(self, folder: Path) -> None:
        """Write all files into a folder, over earlier ones; but not over a result if there is none now."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.data is None and (Result.read(folder) or self.result).outcome != "not run":
            return
        self.page.write(folder)
        self.result.write(folder)  # last, because the overview reads it

    @cached_property
    def page(self) -> Page:
        """The entry's page: its verdicts, charts, table and notes."""
        title, scale = self.entry.title, f"scale {self.scale.name}"
        if self.data is None:
            return Page(title, [scale], f"Not run. {self.missing}", back=_OVERVIEW)
        charts = [chart for draw in self.entry.charts for chart in draw(self.data)]
        return Page(
            title,
            facts=[scale, self.data.statuses],
            summary=f"{self.result.outcome.capitalize()}.",
            sections=[
                *(
                    Section(
                        one.outcome.capitalize(), (one.claim, _readable(one.table)), f"Source: {one.source}."
                    )
                    for one in self.verdicts
                ),
                Section("Figures", charts),
                Section("Table", _readable(self.table())),
                *([Section("Note", self.entry.note)] if self.entry.note else []),
            ],
            warnings=self.data.trouble,
            runs=self.data.runs,
            back=_OVERVIEW,
        )

    def table(self) -> Table:
        """A row for each group of runs that the entry tells apart: the paper's numbers, and ours."""
        entry, data = self.entry, self.data
        assert data is not None
        has_paper = any(model in entry.paper for model in data.values("model"))
        grids = [name for name in entry.rows if name != "lr"]
        has_grid = "lr" in entry.rows and data.runs.group_by(grids).n_unique()["lr"].max() != 1
        rows = []
        for key, runs in data.groups(*entry.rows):
            group = dict(zip(entry.rows, key, strict=True))
            cells = [f"{value:g}" if isinstance(value, float) else str(value) for value in key]
            cells.append(runs.statuses)
            if has_grid:
                cells.append(_remark(data.where(**{name: group[name] for name in grids}), group["lr"]))
            if has_paper:
                known = entry.paper.get(runs.runs["model"][0], {}).get(group["series"])
                cells.append(NOTHING if known is None else f"{known:g}")
            rows.append((*cells, *(quantity.text(runs) for quantity in entry.columns)))
        head = [_HEADS[name] for name in entry.rows] + ["Runs"]
        head += [""] * has_grid + ["Paper"] * has_paper + [quantity.head for quantity in entry.columns]
        return Table(tuple(head), tuple(rows), num_text=len(entry.rows) + 1 + has_grid)


def write_overview(scale: Scale, folder: Path) -> None:
    """Write the page of all entries from the results written so far."""
    results = _results(folder)
    rows = tuple((one.entry, one.title, one.outcome, one.says) for one in results)
    sections = [Section("Verdicts", Table(("Name", "Entry", "Verdict", "Claim"), rows, num_text=4))]
    made = [one.entry for one in results]
    if others := [f"`{name}`: {entry.shows}" for name, entry in ENTRIES.items() if name not in made]:
        sections.append(Section("Not made yet", others))
    page = Page("Does the paper hold?", [f"scale {scale.name}", scale.summary], tally(results), sections)
    durable.write(folder / "index.html", page.html())
    durable.write(folder / "table.md", page.markdown())


def check_scale(scale: Scale, folder: Path) -> None:
    """Refuse a folder with entries of another scale: they would be overwritten, or shown as this one's."""
    for result in _results(folder):
        if result.scale != scale.name:
            raise ValueError(
                f"{folder} has entries of scale {result.scale}, for example {result.entry}, and cannot hold "
                f"entries of scale {scale.name}; choose another folder with --out"
            )


def tally(results: Sequence[Result]) -> str:
    """The number of entries with each outcome, as a sentence."""
    outcomes = [result.outcome for result in results]
    counts = [f"{kind}: {outcomes.count(kind)}" for kind in reversed(get_args(Outcome)) if kind in outcomes]
    return f"Of {len(outcomes)} figures and tables, {', '.join(counts)}."


def _results(folder: Path) -> list[Result]:
    """Those of the entries that a folder holds."""
    return [result for name in ENTRIES if (result := Result.read(folder / name)) is not None]


def _remark(grid: Data, rate: float) -> str:
    """Whether a rate is the best of its grid."""
    rates = sorted(grid.values("lr"))
    if len(rates) == 1 or rate != best_rate(grid):
        return ""
    return "best, on the edge of the grid" if rate in (rates[0], rates[-1]) else "best"


def _readable(table: Table) -> Table:
    """A table without columns of dashes."""
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=False))
    return table.only([name for name, cells in columns.items() if set(cells) != {NOTHING}])
