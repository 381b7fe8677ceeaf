"""An entry as files (index.html, SVGs, table.csv, table.md, verdict.json), and the overview of all."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from merit_lab.paper.checks import Comparison, Outcome, Verdict, worst
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.entry import Entry
from merit_lab.paper.plan import Data
from merit_lab.paper.quantities import best_rate
from merit_lab.paper.scales import Scale
from merit_lab.results.page import Page, Section
from merit_lab.runs import durable
from merit_lab.tables import NOTHING, Table

_OVERVIEW = ("../index.html", "all figures and tables")
_HEADS = {"panel": "Model", "series": "Optimizer", "batch": "Batch", "lr": "Peak learning rate"}


@dataclass(frozen=True)
class Artefact:
    """An entry made from its runs, or the reason why it could not be made."""

    entry: Entry
    scale: Scale
    data: Data | None
    missing: str = ""

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """On each claim."""
        if self.data is None:
            return []
        return [claim.verdict(self.data, self.entry.paper) for claim in self.entry.claims]

    @cached_property
    def content(self) -> dict[str, Any]:
        """The content of verdict.json."""
        entry, data = self.entry, self.data
        content = {"entry": entry.name, "title": entry.title, "scale": self.scale.name}
        if data is None:
            return {**content, "outcome": "not run", "missing": self.missing}
        verdicts = [
            {
                "claim": verdict.claim.says,
                "source": verdict.claim.source or entry.of_paper.lower(),
                "outcome": verdict.outcome,
                "comparisons": list(map(_as_json, verdict.comparisons)),
            }
            for verdict in self.verdicts
        ]
        content["outcome"] = worst(verdict.outcome for verdict in self.verdicts)
        return {**content, "verdicts": verdicts, "note": entry.note, "trouble": data.trouble}

    def write(self, folder: Path) -> None:
        """Write all files into a folder, over earlier ones; but not over a result if there is none now."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.data is None and (_read(folder) or self.content)["outcome"] != "not run":
            return
        self.page.write(folder)
        # Last, because the overview reads it.
        durable.write(folder / "verdict.json", json.dumps(self.content, indent=2) + "\n")

    @cached_property
    def page(self) -> Page:
        """The entry's page: its verdicts, charts, table and notes."""
        title, scale = self.entry.title, f"scale {self.scale.name}"
        if self.data is None:
            return Page(title, [scale], f"Not run. {self.missing}", back=_OVERVIEW)
        sections = []
        for verdict, content in zip(self.verdicts, self.content["verdicts"], strict=True):
            said = verdict.claim.says, _readable(comparisons(verdict))
            source = f"Source: {content['source']}."
            sections.append(Section(verdict.outcome.capitalize(), said, caption=source))
        charts = [chart for draw in self.entry.charts for chart in draw(self.data)]
        sections += [Section("Figures", charts), Section("Table", _readable(self.table()))]
        if self.entry.note:
            sections.append(Section("Note", self.entry.note))
        return Page(
            title,
            facts=[scale, self.data.statuses],
            summary=f"{self.content['outcome'].capitalize()}.",
            sections=sections,
            warnings=self.data.trouble,
            runs=self.data.runs,
            back=_OVERVIEW,
        )

    def table(self) -> Table:
        """A row for each group of runs that the entry tells apart: the paper's numbers, and ours."""
        entry, data = self.entry, self.data
        assert data is not None
        has_paper = entry.paper is not None and any(data.values("paper"))
        grids = [name for name in entry.rows if name != "lr"]
        has_grid = "lr" in entry.rows and data.runs.group_by(grids).n_unique()["lr"].max() != 1
        rows = []
        for key, runs in data.groups(*entry.rows):
            group = dict(zip(entry.rows, key, strict=True))
            cells = [f"{value:g}" if isinstance(value, float) else str(value) for value in key]
            cells.append(runs.statuses)
            if has_grid:
                cells.append(_remark(data.where(**{name: group[name] for name in grids}), group["lr"]))
            if has_paper and entry.paper is not None:
                known = entry.paper.get(runs.runs["paper"][0], {}).get(group["series"])
                cells.append(NOTHING if known is None else f"{known:g}")
            rows.append((*cells, *(quantity.text(runs) for quantity in entry.columns.values())))
        head = [_HEADS[name] for name in entry.rows] + ["Runs"]
        head += [""] * has_grid + ["Paper"] * has_paper + list(entry.columns)
        return Table(tuple(head), tuple(rows), num_text=len(entry.rows) + 1 + has_grid)


def comparisons(verdict: Verdict) -> Table:
    """A row for each comparison of a claim."""
    rows = tuple((one.what, one.paper or NOTHING, one.words, one.outcome) for one in verdict.comparisons)
    return Table(("Comparison", "Paper", "Here", "Verdict"), rows, num_text=4)


def write_overview(scale: Scale, folder: Path) -> None:
    """Write the page of all entries from the verdicts written so far."""
    verdicts = [verdict for name in ENTRIES if (verdict := _read(folder / name)) is not None]
    rows = []
    for verdict in verdicts:
        says = verdict.get("missing") or " ".join(claim["claim"] for claim in verdict["verdicts"])
        rows.append((verdict["entry"], verdict["title"], verdict["outcome"], says))
    sections = [Section("Verdicts", Table(("Name", "Entry", "Verdict", "Claim"), tuple(rows), num_text=4))]
    made = [row[0] for row in rows]
    if others := [f"`{name}`: {entry.shows}" for name, entry in ENTRIES.items() if name not in made]:
        sections.append(Section("Not made yet", others))
    page = Page("Does the paper hold?", [f"scale {scale.name}", scale.summary], tally(verdicts), sections)
    durable.write(folder / "index.html", page.html())
    durable.write(folder / "table.md", page.markdown())


def check_scale(scale: Scale, folder: Path) -> None:
    """Refuse a folder with entries of another scale: they would be overwritten, or shown as this one's."""
    for path in sorted(folder.glob("*/verdict.json")):
        verdict = _read(path.parent)
        if verdict is not None and verdict["scale"] != scale.name:
            raise ValueError(
                f"{folder} has entries of scale {verdict['scale']}, for example {path.parent.name}, and "
                f"cannot hold entries of scale {scale.name}; choose another folder with --out"
            )


def tally(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """The number of entries with each outcome, as a sentence."""
    outcomes = [verdict["outcome"] for verdict in verdicts]
    counts = [f"{kind}: {outcomes.count(kind)}" for kind in get_args(Outcome) if kind in outcomes]
    return f"Of {len(outcomes)} figures and tables, {', '.join(counts)}."


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


def _read(folder: Path) -> dict[str, Any] | None:
    """The verdict in a folder; None if there is none."""
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


def _as_json(one: Comparison) -> dict[str, Any]:
    numbers = {name: getattr(one.difference, name) for name in ("mean", "low", "high")}
    numbers = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    said = {"what": one.what, "paper": one.paper, "outcome": one.outcome, "words": one.words}
    return {**said, "seeds": list(one.difference.seeds), **numbers}
