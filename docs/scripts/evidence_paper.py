"""The tables of docs/paper-results.md: entries of `merit reproduce`, made from results/nano alone."""

from collections.abc import Callable
from functools import cache, partial

from evidence_runs import ROOT

from merit_lab.paper.artefact import Artefact, Missing, comparisons
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Corpus, Found
from merit_lab.paper.scales import SCALES
from merit_lab.paper.work import Task
from merit_lab.tables import Table

_FOLDER = ROOT / "results/nano"
_SEEDS = {"horizon": 3, "warmup": 3}
NAMES = (
    *("fig2", "fig4", "fig6", "fig9", "fig13", "fig14", "fig15", "table2", "table3", "table4", "llama-rates"),
    *("reference", "horizon", "doubled", "variants", "norm", "logits", "reach", "warmup"),
)


@cache
def made(name: str) -> Artefact:
    """An entry from the records."""
    corpus = Corpus.recall(_FOLDER)
    assert corpus is not None
    entry = ENTRIES[name]
    task = Task(
        entries=[entry],
        scale=SCALES["nano"],
        corpus=corpus,
        folder=_FOLDER,
        seeds=_SEEDS.get(name),
        trains=False,
    )
    artefact = task.make(entry, _found())
    assert not isinstance(artefact, Missing), artefact
    return artefact


@cache
def _found() -> Found:
    return Found.in_folder(_FOLDER)


def table(name: str) -> Table:
    """The table of an entry, without rows that have no run."""
    whole = made(name).table
    place = whole.head.index("Runs")
    return Table(
        whole.head,
        tuple(row for row in whole.rows if not row[place].endswith(" missing") or "," in row[place]),
        whole.num_text,
    )


def claims(name: str) -> Table:
    """What the runs say of each claim of an entry."""
    tables = [comparisons(verdict) for verdict in made(name).verdicts]
    return Table(tables[0].head, tuple(row for one in tables for row in one.rows), tables[0].num_text)


TABLES: dict[str, Callable[[], Table]] = {
    **{f"paper-{name}": partial(table, name) for name in NAMES},
    **{f"claims-{name}": partial(claims, name) for name in NAMES},
}
