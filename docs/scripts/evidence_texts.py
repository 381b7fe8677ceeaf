"""The tables of the comparison on two texts: 10M parameters, query, key and value as three weights."""

import math
from functools import cache
from pathlib import Path

import polars as pl
from evidence_runs import ORDER, RESULTS, Row, as_table, by_seed, shown

from merit_lab.results import charts, statistic
from merit_lab.results.names import DISPLAY_NAMES as NAMES
from merit_lab.runs import table
from merit_lab.tables import NOTHING, Table

TEXTS = ("enwik8", "mix")
CONTESTANTS = ("adamw", "lamb-uncorrected", "merit", "soap", "muon", "normuon", "muon-merit")
_OF_RUN = {
    "name": "optimizer.name",
    "lr": "optimizer.lr",
    "warmup": "optimizer.warmup",
    "rate_scale": "optimizer.rate_scale",
}
_LEVEL = 0.02  # what seeds of one setting differ by
_SETTINGS = ("qkv", "data", "steps", "name", "lr", "rate_scale", "warmup")
COLUMNS = [(text, steps) for steps in (200, 800) for text in TEXTS]
HEADS = [f"{text}, {steps} steps" for text, steps in COLUMNS]


@cache
def settings() -> pl.DataFrame:
    """A row a setting: its losses by seed, their mean and spread."""
    runs = table.read(RESULTS / "texts").runs.rename({old: new for new, old in _OF_RUN.items()})
    found = runs.sort("seed").group_by(_SETTINGS, maintain_order=True)
    loss = pl.col("validation_loss")
    return found.agg(
        seeds=pl.col("seed"), losses=loss, num_seeds=pl.len(), mean=loss.mean(), deviation=loss.std()
    ).with_columns(shown=pl.struct("mean", "deviation").map_elements(shown, pl.String))


def best(text: str, name: str, steps: int = 200, qkv: str = "three weights") -> Row | None:
    """The setting with the lowest loss at seed 0; of those within 0.02 of it the one with the most seeds."""
    found = settings().filter(data=text, name=name, steps=steps, qkv=qkv)
    found = found.with_columns(first=pl.col("losses").list.first())
    level = found.filter(pl.col("first") < pl.col("first").min() + _LEVEL)
    return next(level.sort("num_seeds", "first", descending=[True, False]).iter_rows(named=True), None)


def headline() -> Table:
    """The loss of each optimizer on each text, after few large steps and after many small ones."""
    rows = []
    for name in CONTESTANTS:
        found = [best(text, name, steps) for text, steps in COLUMNS]
        rows.append((NAMES[name], *(NOTHING if one is None else one["shown"] for one in found)))
    return Table(("Optimizer", *HEADS), tuple(rows))


def above() -> Table:
    """How far each optimizer is above MuonMERIT."""
    others = [name for name in CONTESTANTS if name != "muon-merit"]
    rows = ((NAMES[name], *(_above(name, *column) for column in COLUMNS)) for name in others)
    return Table(("Above MuonMERIT", *HEADS), tuple(rows))


def _above(name: str, text: str, steps: int) -> str:
    one, ours = best(text, name, steps), best(text, "muon-merit", steps)
    if one is None or ours is None:
        return NOTHING
    found = statistic.paired(by_seed(one), by_seed(ours))
    interval = "" if math.isinf(found.high) else f" ({found.low:z.3f} to {found.high:z.3f})"
    return f"{found.mean:z.3f}{interval}" if interval else f"{found.mean:z.2f}"


def tried(steps: int) -> Table:
    """Every setting that was tried, on both texts."""
    rows = settings().filter(qkv="three weights", steps=steps)
    wide = rows.pivot("data", index=["name", "lr", "rate_scale", "warmup"], values="shown")
    return as_table(wide.sort(ORDER, "lr", "rate_scale", "warmup"))


def splitting() -> Table:
    """What one weight for query, key and value costs, at one setting with one seed."""
    rows = []
    for name in ("normuon", "muon-merit"):
        cells = []
        for text in TEXTS:
            one = best(text, name, qkv="one weight")
            assert one is not None
            same = {key: one[key] for key in ("data", "steps", "name", "lr", "warmup")}
            rest = pl.col("rate_scale").eq_missing(pl.lit(one["rate_scale"]))
            split = settings().filter(rest, qkv="three weights", **same).row(0, named=True)
            difference = statistic.paired(by_seed(one), by_seed(split))
            cells += [f"{one['losses'][0]:.3f}", f"{by_seed(split)[0]:.3f}", f"{difference.mean:z.3f}"]
        rows.append((NAMES[name], *cells))
    head = [part for text in TEXTS for part in (f"{text}: one weight", "three", "gain")]
    return Table(("Optimizer", *head), tuple(rows))


def draw(path: Path) -> None:
    """The loss over the steps on the mix, of each optimizer at its best."""
    known = table.read(RESULTS / "texts")
    keys = pl.DataFrame([best("mix", name) or {} for name in CONTESTANTS]).select(_SETTINGS)
    columns = {column: _OF_RUN.get(column, column) for column in _SETTINGS}
    runs = known.runs.join(keys.rename(columns), on=list(columns.values()), how="semi", nulls_equal=True)
    steps = known.steps.filter(pl.col("step") > 25)
    chart = charts.curves(
        runs,
        steps,
        name=path.stem,
        title="Validation loss on the mix, 10M parameters, batches of 512 sequences",
    )
    chart.write(path.parent)
