"""An entry's files: index.html, SVG figures, table.csv, table.md, runs.csv, verdict.json; the overview."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merit_lab.record import durable
from merit_lab.report.style import CONFIG
from merit_lab.report.tables import NOTHING, Table
from merit_lab.report.template import render
from merit_lab.reproduce.entry import Entry, Result
from merit_lab.reproduce.records import Record, Records
from merit_lab.reproduce.scale import Scale
from merit_lab.reproduce.verdict import Verdict
from merit_lab.study.page import on_page, write_charts

_RUNS_HEAD = ("run", "panel", "series", "batch", "lr", "seed", "status", "validation_loss", "largest_logit")
_OUTCOMES = ("held", "contradicted", "undecided", "no test", "not run")


@dataclass(frozen=True)
class EntryFindings:
    """What an entry came to, and its files."""

    entry: Entry
    scale: Scale
    records: Records
    result: Result

    @property
    def summary(self) -> str:
        return f"{self.entry.name}: {self.result.outcome}"

    @property
    def verdict(self) -> dict[str, Any]:
        """What verdict.json says."""
        charts = self.result.charts
        return {
            **_head(self.entry, self.scale),
            "outcome": self.result.outcome,
            "verdicts": [_as_json(own) for own in self.result.verdicts],
            "notes": list(self.result.notes),
            "trouble": self.records.trouble,
            "picture": f"{charts[0].name}.svg" if charts else None,
        }

    def write(self, folder: Path) -> Path:
        """Write all files into a folder, over earlier ones; return the page's path."""
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("*.svg"):  # of a version with other charts
            earlier.unlink()
        table = self.result.table
        write_charts(self.result.charts, folder)
        _write_csv(folder / "table.csv", [table.head, *table.rows])
        _write_csv(folder / "runs.csv", [_RUNS_HEAD, *map(_run_row, self.records.all)])
        (folder / "table.md").write_text(table.markdown(), encoding="utf-8")
        runs = [own.folder.name for own in self.records.all]
        return _write_page(folder, self.verdict, self.result, runs)


@dataclass(frozen=True)
class Missing:
    """That an entry could not be made, and what it lacks."""

    entry: Entry
    scale: Scale
    reason: str

    @property
    def summary(self) -> str:
        return f"{self.entry.name} is left out: {self.reason}"

    @property
    def verdict(self) -> dict[str, Any]:
        """What verdict.json says."""
        return {**_head(self.entry, self.scale), "outcome": "not run", "missing": self.reason}

    def write(self, folder: Path) -> Path:
        """Write a page that says so, unless there are earlier results: those are not touched."""
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "table.csv").exists():
            return folder / "index.html"
        return _write_page(folder, self.verdict, None, [])


def write_overview(scale: Scale, entries: Sequence[Entry], folder: Path) -> Path:
    """The page of all entries, from what was written about each so far."""
    said = {own.name: _read_verdict(folder / own.name) for own in entries}
    cards = [_card(own, folder) for own in said.values() if own is not None]
    page = folder / "index.html"
    text = render(
        "reproduce/overview.html",
        title="Does the paper hold?",
        facts=[scale.name, scale.summary],
        summary=tally(cards),
        entries=cards,
        others=[own for own in entries if said[own.name] is None],
        scale=scale.name,
    )
    durable.write(page, text)
    return page


def check_scale(scale: Scale, folder: Path) -> None:
    """Refuse a folder with entries of another scale: they would be written over, or shown as of this one."""
    for path in sorted(folder.glob("*/verdict.json")):
        said = _read_verdict(path.parent)
        if said is not None and said["scale"] != scale.name:
            raise ValueError(
                f"{folder} holds entries of scale {said['scale']}, {path.parent.name} among them, and "
                f"{scale.name} was asked for; choose another folder with --out"
            )


def tally(said: Sequence[Mapping[str, Any]]) -> str:
    """How many entries held, and so on, in a sentence."""
    outcomes = [own["outcome"] for own in said]
    counts = [f"{outcomes.count(kind)} {kind}" for kind in _OUTCOMES if kind in outcomes]
    return f"Of {len(outcomes)} figures and tables: {', '.join(counts)}."


def _head(entry: Entry, scale: Scale) -> dict[str, Any]:
    return {"entry": entry.name, "title": entry.title, "shows": entry.shows, "scale": scale.name}


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "claim": verdict.claim,
        "source": verdict.source,
        "outcome": verdict.outcome,
        "comparisons": [
            {
                "what": own.what,
                "paper": own.paper,
                "ours": own.ours,
                "margins": [m if math.isfinite(m) else str(m) for m in own.margins],
                "unit": own.unit,
                "seeds": own.num_seeds,
                "test": own.test or None,
                "p": own.chance,
                "judgement": own.judgement,
                "outcome": outcome,
            }
            for own, outcome in zip(verdict.comparisons, verdict.outcomes, strict=True)
        ],
    }


def _write_page(folder: Path, said: dict[str, Any], result: Result | None, runs: Sequence[str]) -> Path:
    charts = result.charts if result else ()
    specs = {own.name: on_page(own) for own in charts}
    text = render(
        "reproduce/page.html",
        title=said["title"],
        facts=[said["shows"], f"scale {said['scale']}"],
        missing=said.get("missing"),
        verdicts=said.get("verdicts", []),
        notes=said.get("notes", []),
        trouble=said.get("trouble", []),
        charts=charts,
        **(_readable(result.table) if result else {}),
        runs=runs,
        data={"config": CONFIG, "charts": specs} if charts else None,
    )
    durable.write(folder / "index.html", text)
    durable.write(folder / "verdict.json", json.dumps(said, indent=2) + "\n")  # last: the overview reads it
    return folder / "index.html"


def _readable(table: Table) -> dict[str, Any]:
    """A table for the page, without what the files need: one model in every row, columns of dashes."""
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=False))
    names = [name for name, cells in columns.items() if set(cells) != {NOTHING}]
    models = sorted(set(columns.get("Model", ())))
    if len(models) > 1 or not models:
        return {"table": table.only(names), "caption": ""}
    names.remove("Model")
    return {"table": table.only(names), "caption": models[0]}


def _card(said: dict[str, Any], folder: Path) -> dict[str, Any]:
    name, picture = said["entry"], None
    if said.get("picture") and (folder / name / said["picture"]).exists():
        encoded = base64.b64encode((folder / name / said["picture"]).read_bytes()).decode()
        picture = f"data:image/svg+xml;base64,{encoded}"
    claims = " ".join(own["claim"] for own in said.get("verdicts", []))
    return {
        "name": name,
        "title": said["title"],
        "outcome": said["outcome"],
        "text": said.get("missing") or claims,
        "picture": picture,
    }


def _read_verdict(folder: Path) -> dict[str, Any] | None:
    path = folder / "verdict.json"
    if not path.exists():
        return None
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"entry", "title", "scale", "outcome"} <= set(said):
            raise ValueError("no verdict")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); remove it and make {folder.name} again, from runs that are kept"
        ) from error
    return said


def _write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _run_row(record: Record) -> tuple[object, ...]:
    """One run: means are quickly taken, but not taken apart again."""
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
