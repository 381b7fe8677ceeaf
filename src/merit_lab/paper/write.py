"""Write an entry's files (index.html, SVGs, table.csv, table.md, runs.csv, verdict.json) and the overview."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import Records, TrialRecord
from merit_lab.paper.setups import Scale
from merit_lab.paper.verdict import Outcome, Verdict
from merit_lab.results.style import CONFIG
from merit_lab.results.template import render
from merit_lab.runs import durable
from merit_lab.study.page import on_page, write_charts
from merit_lab.tables import NOTHING, Table

_RUNS_HEAD = ("run", "panel", "series", "batch", "lr", "seed", "status", "validation_loss", "largest_logit")


@dataclass(frozen=True)
class EntryFindings:
    """An entry's analysis, and the files that it is written to."""

    entry: PaperEntry
    scale: Scale
    records: Records
    analysis: Analysis

    @property
    def summary(self) -> str:
        return f"{self.entry.name}: {self.analysis.outcome}"

    @property
    def verdict(self) -> dict[str, Any]:
        """The content of verdict.json."""
        charts = self.analysis.charts
        return {
            **_head(self.entry, self.scale),
            "outcome": self.analysis.outcome,
            "verdicts": [_as_json(verdict) for verdict in self.analysis.verdicts],
            "notes": list(self.analysis.notes),
            "trouble": self.records.trouble,
            "picture": f"{charts[0].name}.svg" if charts else None,
        }

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, over earlier ones; return the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("*.svg"):  # an earlier version may have had other charts
            earlier.unlink()
        table = self.analysis.table
        write_charts(self.analysis.charts, folder)
        _write_csv(folder / "table.csv", [table.head, *table.rows])
        _write_csv(folder / "runs.csv", [_RUNS_HEAD, *map(_run_row, self.records.all)])
        (folder / "table.md").write_text(table.markdown(), encoding="utf-8")
        runs = [record.folder.name for record in self.records.all]
        return _write_page(folder, self.verdict, self.analysis, runs)


@dataclass(frozen=True)
class MissingEntry:
    """An entry that could not be made, and why."""

    entry: PaperEntry
    scale: Scale
    reason: str

    @property
    def summary(self) -> str:
        return f"{self.entry.name} is left out: {self.reason}"

    @property
    def verdict(self) -> dict[str, Any]:
        """The content of verdict.json."""
        return {**_head(self.entry, self.scale), "outcome": "not run", "missing": self.reason}

    def write(self, folder: Path) -> Path:
        """Write a page that says so, unless the folder has earlier results: those are left as they are."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "table.csv").exists():
            return folder / "index.html"
        return _write_page(folder, self.verdict, None, [])


def write_overview(scale: Scale, entries: Sequence[PaperEntry], folder: Path) -> Path:
    """Write the page of all entries from the verdicts written so far."""
    verdicts = {entry.name: _read_verdict(folder / entry.name) for entry in entries}
    cards = [_card(verdict, folder) for verdict in verdicts.values() if verdict is not None]
    page = folder / "index.html"
    text = render(
        "paper/overview.html",
        title="Does the paper hold?",
        facts=[scale.name, scale.summary],
        summary=tally(cards),
        entries=cards,
        others=[entry for entry in entries if verdicts[entry.name] is None],
        scale=scale.name,
    )
    durable.write(page, text)
    return page


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


def _head(entry: PaperEntry, scale: Scale) -> dict[str, Any]:
    return {"entry": entry.name, "title": entry.title, "shows": entry.shows, "scale": scale.name}


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "claim": verdict.claim,
        "source": verdict.source,
        "outcome": verdict.outcome,
        "comparisons": [
            {
                "what": comparison.label,
                "paper": comparison.paper,
                "ours": comparison.ours,
                "margins": [m if math.isfinite(m) else str(m) for m in comparison.margins],
                "unit": comparison.unit,
                "seeds": comparison.num_seeds,
                "test": comparison.test or None,
                "p": comparison.p_value,
                "judgement": comparison.judgement,
                "outcome": outcome,
            }
            for comparison, outcome in zip(verdict.comparisons, verdict.outcomes, strict=True)
        ],
    }


def _write_page(
    folder: Path, verdict: dict[str, Any], analysis: Analysis | None, runs: Sequence[str]
) -> Path:
    charts = analysis.charts if analysis else ()
    specs = {chart.name: on_page(chart) for chart in charts}
    text = render(
        "paper/page.html",
        title=verdict["title"],
        facts=[verdict["shows"], f"scale {verdict['scale']}"],
        missing=verdict.get("missing"),
        verdicts=verdict.get("verdicts", []),
        notes=verdict.get("notes", []),
        trouble=verdict.get("trouble", []),
        charts=charts,
        **(_readable(analysis.table) if analysis else {}),
        runs=runs,
        data={"config": CONFIG, "charts": specs} if charts else None,
    )
    durable.write(folder / "index.html", text)
    # Last, because the overview reads it.
    durable.write(folder / "verdict.json", json.dumps(verdict, indent=2) + "\n")
    return folder / "index.html"


def _readable(table: Table) -> dict[str, Any]:
    """A table for the page, without columns of dashes; a model that all rows share becomes the caption."""
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=False))
    names = [name for name, cells in columns.items() if set(cells) != {NOTHING}]
    models = sorted(set(columns.get("Model", ())))
    if len(models) > 1 or not models:
        return {"table": table.only(names), "caption": ""}
    names.remove("Model")
    return {"table": table.only(names), "caption": models[0]}


def _card(verdict: dict[str, Any], folder: Path) -> dict[str, Any]:
    name, picture = verdict["entry"], None
    if verdict.get("picture") and (folder / name / verdict["picture"]).exists():
        encoded = base64.b64encode((folder / name / verdict["picture"]).read_bytes()).decode()
        picture = f"data:image/svg+xml;base64,{encoded}"
    claims = " ".join(claim["claim"] for claim in verdict.get("verdicts", []))
    return {
        "name": name,
        "title": verdict["title"],
        "outcome": verdict["outcome"],
        "text": verdict.get("missing") or claims,
        "picture": picture,
    }


def _read_verdict(folder: Path) -> dict[str, Any] | None:
    path = folder / "verdict.json"
    if not path.exists():
        return None
    try:
        verdict: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"entry", "title", "scale", "outcome"} <= set(verdict):
            raise ValueError("no verdict")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove it and make {folder.name} again; its runs are kept"
        ) from error
    return verdict


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _run_row(record: TrialRecord) -> tuple[object, ...]:
    """One run: means can be computed from it, but not the other way round."""
    config = record.config
    return (
        record.folder.name,
        record.panel,
        record.series,
        config.batch,
        config.optimizer.lr,
        config.seed,
        record.status,
        record.final_loss(),
        record.largest("max_logit"),
    )
