"""The tables of docs/paper-results.md: entries of `merit reproduce`, made from results/nano alone."""

from collections.abc import Callable
from functools import cache, partial

from evidence_runs import ROOT

from merit_lab.paper.artefact import Artefact
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.records import Records
from merit_lab.paper.work import Task
from merit_lab.tables import Table

_FOLDER = ROOT / "results/nano"
_SEEDS = {"horizon": 3, "warmup": 3}  # of those with one by default
_TABLES = (
    *("fig4", "fig6", "fig9", "fig13", "fig15", "table2", "table4", "llama-rates", "reference"),
    *("horizon", "variants", "norm", "logits", "reach", "warmup"),
)
_CLAIMS = (
    "fig2",
    "fig4",
    "fig6",
    "fig9",
    "horizon",
    "doubled",
    "variants",
    "norm",
    "logits",
    "warmup",
)
_JUDGED = {*_TABLES, *_CLAIMS, "fig14", "table3"}


@cache
def made(name: str) -> Artefact:
    """An entry from the records."""
    task = Task(names=(name,), scale="nano", out=_FOLDER, seeds=_SEEDS.get(name), no_training=True)
    artefact = task.make(ENTRIES[name], _records())
    assert not artefact.missing, artefact.missing
    return artefact


@cache
def _records() -> Records:
    return Records.read(_FOLDER)


def table(name: str) -> Table:
    """The table of an entry, without rows of which no run was made."""
    whole = made(name).table()
    place = whole.head.index("Runs")
    kept = [row for row in whole.rows if not row[place].endswith(" missing") or "," in row[place]]
    return Table(whole.head, tuple(kept), whole.num_text)


def claims(name: str) -> Table:
    """What the runs say of each claim of an entry."""
    tables = [verdict.table.only(["Comparison", "Here", "Verdict"]) for verdict in made(name).verdicts]
    rows = tuple(row for one in tables for row in one.rows if row[2] != "not run")
    return Table(tables[0].head, rows, tables[0].num_text)


def verdicts() -> Table:
    """The verdict on each claim."""
    rows = tuple(
        (f"`{name}`", verdict.claim, verdict.outcome)
        for name in ENTRIES
        if name in _JUDGED
        for verdict in made(name).verdicts
    )
    return Table(("Entry", "Claim", "Here"), rows, num_text=3)


TABLES: dict[str, Callable[[], Table]] = {
    "verdicts": verdicts,
    **{f"paper-{name}": partial(table, name) for name in _TABLES},
    **{f"claims-{name}": partial(claims, name) for name in _CLAIMS},
}
