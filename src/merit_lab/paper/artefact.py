"""An entry as files (index.html, SVGs, table.csv, table.md, verdict.json), and the overview of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from merit_lab.paper.checks import Outcome, Verdict, worst
from merit_lab.paper.entries import ENTRIES, Entry
from merit_lab.paper.plan import Data
from merit_lab.paper.quantities import best_rate
from merit_lab.paper.scales import Scale
from merit_lab.results.page import Chart, Page, Section
from merit_lab.runs import durable
from merit_lab.tables import NOTHING, Table

_OVERVIEW = ("../index.html", "all figures and tables")
_HEADS = {"panel": "Model", "series": "Optimizer", "batch": "Batch", "lr": "Peak learning rate"}


@dataclass(frozen=True)
class Artefact:
    """An entry made from its runs."""

    entry: Entry
    scale: Scale
    data: Data
    table: Table
    verdicts: tuple[Verdict, ...]
    charts: tuple[Chart, ...]

    @classmethod
    def of(cls, entry: Entry, scale: Scale, data: Data) -> Artefact:
        """The entry's table, verdicts and charts, computed from its runs alone."""
        verdicts = tuple(claim.verdict(data) for claim in entry.claims)
        charts = tuple(chart for draw in entry.charts for chart in draw(data))
        return cls(entry, scale, data, table_of(entry, data), verdicts, charts)

    @property
    def outcome(self) -> Outcome:
        """The worst of the claims' outcomes."""
        return worst([verdict.outcome for verdict in self.verdicts])

    @property
    def verdict(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {
            **_head(self.entry, self.scale),
            "outcome": self.outcome,
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
            "notes": list(self.entry.notes),
            "trouble": self.data.trouble,
        }

    def write(self, folder: Path) -> None:
        """Write all files into a folder, over earlier ones."""
        folder.mkdir(parents=True, exist_ok=True)
        self._page().write(folder)
        # Last, because the overview reads it.
        durable.write(folder / "verdict.json", json.dumps(self.verdict, indent=2) + "\n")

    def _page(self) -> Page:
        sections = [
            Section(
                f"{verdict.outcome.capitalize()}: {verdict.claim.says}",
                _readable(comparisons(verdict)),
                caption=f"Source: {verdict.claim.source}.",
            )
            for verdict in self.verdicts
        ]
        sections.append(Section("Figures", self.charts))
        sections.append(Section("Table", _readable(self.table)))
        if self.entry.notes:
            sections.append(Section("Notes", self.entry.notes))
        return Page(
            self.entry.title,
            facts=[self.entry.shows, f"scale {self.scale.name}", self.data.statuses],
            summary=f"{self.outcome.capitalize()}.",
            sections=sections,
            warnings=self.data.trouble,
            runs=self.data.runs,
            back=_OVERVIEW,
        )


@dataclass(frozen=True)
class Missing:
    """An entry that could not be made, and why."""

    entry: Entry
    scale: Scale
    reason: str

    @property
    def verdict(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {**_head(self.entry, self.scale), "outcome": "not run", "missing": self.reason}

    def write(self, folder: Path) -> None:
        """Write a page that says so, unless the folder has earlier results: those are left as they are."""
        folder.mkdir(parents=True, exist_ok=True)
        if (_read_verdict(folder) or self.verdict)["outcome"] == "not run":
            facts = [self.entry.shows, f"scale {self.scale.name}"]
            Page(self.entry.title, facts, f"Not run. {self.reason}", back=_OVERVIEW).write(folder)
            durable.write(folder / "verdict.json", json.dumps(self.verdict, indent=2) + "\n")


def table_of(entry: Entry, data: Data) -> Table:
    """A row for each group of runs that the entry tells apart: the paper's numbers, and ours."""
    has_paper = entry.paper is not None and any(data.values("paper"))
    has_grid = "lr" in entry.rows and data.runs.group_by("panel", "series").n_unique()["lr"].max() != 1
    rows = []
    for key, runs in data.groups(*entry.rows):
        group = dict(zip(entry.rows, key, strict=True))
        cells = [f"{value:g}" if isinstance(value, float) else str(value) for value in key]
        cells.append(runs.statuses)
        if has_grid:
            cells.append(_remark(data.where(panel=group["panel"], series=group["series"]), group["lr"]))
        if has_paper and entry.paper is not None:
            known = entry.paper.get(runs.runs["paper"][0], {}).get(group["series"])
            cells.append(NOTHING if known is None else f"{known:g}")
        rows.append((*cells, *(quantity.text(runs) for quantity in entry.columns.values())))
    head = [_HEADS[name] for name in entry.rows] + ["Runs"]
    head += [""] * has_grid + ["Paper"] * has_paper + list(entry.columns)
    num_text = len(entry.rows) + 1 + has_grid
    return Table(tuple(head), tuple(rows), num_text=num_text)


def _remark(grid: Data, rate: float) -> str:
    """Whether a rate is the best of its grid."""
    rates = sorted(grid.values("lr"))
    if len(rates) == 1 or rate != best_rate(grid):
        return ""
    return "best, on the edge of the grid" if rate in (rates[0], rates[-1]) else "best"


def write_overview(scale: Scale, folder: Path) -> None:
    """Write the page of all entries from the verdicts written so far."""
    verdicts = [verdict for name in ENTRIES if (verdict := _read_verdict(folder / name)) is not None]
    rows = tuple(
        (
            verdict["entry"],
            verdict["title"],
            verdict["outcome"],
            verdict.get("missing") or " ".join(claim["claim"] for claim in verdict["verdicts"]),
        )
        for verdict in verdicts
    )
    table = Table(("Name", "Entry", "Verdict", "Claim"), rows, num_text=4)
    others = [entry for entry in ENTRIES.values() if entry.name not in {row[0] for row in rows}]
    sections = [Section("Verdicts", table)]
    if others:
        sections.append(Section("Not made yet", [f"`{entry.name}`: {entry.shows}" for entry in others]))
    page = Page("Does the paper hold?", [f"scale {scale.name}", scale.summary], tally(verdicts), sections)
    durable.write(folder / "index.html", page.html())


def check_scale(scale: Scale, folder: Path) -> None:
    """Refuse a folder with entries of another scale: they would be overwritten, or shown as this one's."""
    for path in sorted(folder.glob("*/verdict.json")):
        verdict = _read_verdict(path.parent)
        if verdict is not None and verdict["scale"] != scale.name:
            raise ValueError(
                f"{folder} has entries of scale {verdict['scale']}, for example {path.parent.name}, and "
                f"cannot hold entries of scale {scale.name}; choose another folder with --out"
            )


def tally(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The number of entries with each outcome, as a sentence."""
    outcomes = [verdict["outcome"] for verdict in verdicts]
    counts = [f"{outcomes.count(kind)} {kind}" for kind in get_args(Outcome) if kind in outcomes]
    return f"Of {len(outcomes)} figures and tables: {', '.join(counts)}."


def _head(entry: Entry, scale: Scale) -> dict[str, Any]:
    return {"entry": entry.name, "title": entry.title, "shows": entry.shows, "scale": scale.name}


def comparisons(verdict: Verdict) -> Table:
    """A row for each comparison of a claim."""
    rows = tuple((one.label, one.paper or NOTHING, one.words, one.outcome) for one in verdict.comparisons)
    return Table(("Comparison", "Paper", "Here", "Verdict"), rows, num_text=4)


def _readable(table: Table) -> Table:
    """A table without columns of dashes."""
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=False))
    return table.only([name for name, cells in columns.items() if set(cells) != {NOTHING}])


def _read_verdict(folder: Path) -> dict[str, Any] | None:
    path = folder / "verdict.json"
    if not path.exists():
        return None
    try:
        verdict: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"entry", "title", "scale", "outcome"} <= set(verdict):
            raise ValueError("no verdict")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove it and make {folder.name} again; its runs are kept"
        ) from error
    return verdict
