"""The runs under results/ as a frame of series: runs that differ in their seeds alone.

The columns of a series, beside those of SETTINGS:

    seeds, losses    of its runs, in the order of seeds; runs: their names in the table
    num_seeds, mean, deviation, shown ("3.384 ± 0.009")
    rates ("0.04, rate_scale 3.2"), setting ("warm-up 40%, momentum 0.9"): in words
    logit, entropy   the largest attention logit at the end, and the mean of attention's entropy
"""

import json
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.results.names import DISPLAY_NAMES, place
from merit_lab.runs import table as runs_table
from merit_lab.tables import NOTHING, Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
SIZES = {256: "10M", 512: "33M", 768: "98M"}  # by width
TEXTS = {"10d319aa": "enwik8", "a4adecd7": "mix", "8206a443": "enwik8, bytes"}  # by fingerprint
MOMENTUM, BOUND = 0.95, 0.2  # of most runs; the largest ratio of MuonMERIT, where it had a bound
# MuonMERIT's momentum, largest ratio and neuron_beta where a run's record does not have them, and since when.
DEFAULTS = (
    ("2026-11-18T03:30", (0.9, 0.1, 0.95)),
    ("2026-11-17T18:32", (0.9, 0.1, None)),
    ("2026-11-16T23:24", (MOMENTUM, BOUND, None)),
    ("", (MOMENTUM, None, None)),
)
TITLES = {
    "name": "Optimizer",
    "size": "Size",
    "steps": "Steps",
    "text": "Text",
    "setting": "Setting",
    "changed": "Changed",
    "momentum": "Momentum",
    "warmup": "Warm-up",
    "weight_decay": "Weight decay",
    "lr": "`lr`",
    "rate_scale": "`rate_scale`",
    "rates": "Learning rate",
    "num_seeds": "Seeds",
    "shown": "Validation loss",
    "logit": "Largest attention logit",
    "entropy": "Entropy",
    "validation_loss": "Validation loss",
    "training_loss": "Training loss",
    "max_logit": "Largest logit at the end",
    "largest_logit": "At any time",
}  # of columns, in tables
FORMATS = {"rate_scale": ".3g", "logit": ",.0f", "entropy": ".1f", "warmup": ".0%", "steps": ","}
FORMATS |= dict.fromkeys(("validation_loss", "training_loss"), ".3f")
FORMATS |= dict.fromkeys(("max_logit", "largest_logit"), ".1f")  # other numbers as "g" has them
ORDER = pl.col("name").map_elements(lambda name: place(name)[0], pl.Int64)  # of optimizers
TUNED = ("momentum", "ratio_bounds", "neuron_beta")  # options with columns of their own
SETTINGS = (
    *("width", "layers", "text", "batch", "steps", "name", "warmup", "weight_decay", "schedule"),
    *("lr", "rate_scale", "momentum", "bound", "equal_rows", "changed"),
)


Row = dict[str, Any]  # of a frame of series


@cache
def table() -> runs_table.Table:
    """All runs that finished, and their steps."""
    studies = (path.parent for path in sorted(RESULTS.rglob("runs.parquet")))
    return runs_table.read(*(study for study in studies if study.name not in ("repeats", "texts")))


@cache
def runs() -> pl.DataFrame:
    """All runs of the lab's GPT that finished, with the columns of SETTINGS."""
    found = table().runs.filter(
        pl.col("status") == "finished",
        pl.col("model.family") == "gpt2",
        pl.col("optimizer.without").is_null(),
    )
    settled = pl.DataFrame([_settled(run) for run in found.iter_rows(named=True)], infer_schema_length=None)
    attention = (
        table()
        .steps.group_by("run")
        .agg(
            pl.col("entropy").drop_nulls().last(),
            entropy_left=pl.col("entropy").drop_nulls().last() / pl.col("entropy").drop_nulls().first(),
            num_entropies=pl.col("entropy").count(),
        )
    )
    return pl.concat([found, settled], how="horizontal").join(attention, on="run", how="left")


def _settled(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run, with the defaults of its time where it names none."""
    options = {
        key.removeprefix("optimizer.options."): value
        for key, value in run.items()
        if key.startswith("optimizer.options.") and value is not None
    }
    name = run["optimizer.name"]
    momentum, bound, rows = MOMENTUM, None, 0.95 if name == "normuon" else None
    if name == "muon-merit" and run["environment.optimizer"]:  # newer records have all options
        group = dict(json.loads(run["environment.optimizer"])[0])
        momentum, rows = group["momentum"], group["neuron_beta"]
        bound = group["ratio_bounds"] and group["ratio_bounds"][1]
    elif name == "muon-merit":
        momentum, bound, rows = next(
            values for since, values in DEFAULTS if run["environment.started"] >= since
        )
    if "ratio_bounds" in options:
        bound = json.loads(options["ratio_bounds"])[1]
    overrides = json.loads(run["optimizer.overrides"] or "[]")
    if "*:neuron_beta=0.95" in overrides:  # of all parameters, as the option
        rows = 0.95
        overrides.remove("*:neuron_beta=0.95")
    others = [f"{key}={value}" for key, value in options.items() if key not in TUNED]
    others += ["with AdamW on the rest"] if run["optimizer.rest"] else []
    return {
        "study": str(Path(run["folder"]).relative_to(RESULTS)).partition("/runs.parquet")[0],
        "width": run["model.width"],
        "layers": run["model.layers"],
        "text": TEXTS[run["environment.data.fingerprint"][:8]],
        "name": name,
        "warmup": run["optimizer.warmup"],
        "weight_decay": run["optimizer.weight_decay"],
        "schedule": run["optimizer.schedule"] or ("constant" if run["optimizer.final"] == 1 else "cosine"),
        "lr": run["optimizer.lr"],
        "rate_scale": run["optimizer.rate_scale"],
        "momentum": options.get("momentum", momentum),
        "bound": bound,
        "equal_rows": options.get("neuron_beta", rows) is not None,
        "changed": ", ".join(sorted([*others, *overrides])),
    }


def series(of: pl.DataFrame | None = None, **where: Any) -> pl.DataFrame:
    """The series with these settings, of all studies but arenas, or of these runs."""
    found = runs().filter(~pl.col("study").str.starts_with("arena")) if of is None else of
    for column, value in where.items():
        found = found.filter(pl.col(column).is_in(value if isinstance(value, tuple) else [value]))
    # The first run of each seed: some were made again, to see what rounding does.
    found = found.unique([*SETTINGS, "seed"], keep="first", maintain_order=True).sort(
        "seed", maintain_order=True
    )
    grouped = found.group_by(SETTINGS, maintain_order=True).agg(
        seeds=pl.col("seed"),
        losses=pl.col("validation_loss"),
        runs=pl.col("run"),
        num_seeds=pl.len(),
        mean=pl.col("validation_loss").mean(),
        deviation=pl.col("validation_loss").std(),
        logit=pl.col("max_logit").max(),
        entropy=pl.col("entropy").mean(),
    )
    words = pl.struct(pl.all()).map_elements
    return grouped.with_columns(
        shown=words(shown, pl.String), rates=words(_rates, pl.String), setting=words(_setting, pl.String)
    )


def shown(one: dict[str, Any]) -> str:
    deviation = one["deviation"]
    return f"{one['mean']:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")


def _rates(one: dict[str, Any]) -> str:
    scale = one["rate_scale"]
    return f"{one['lr']:g}" + ("" if scale is None else f", `rate_scale` {scale:.3g}")


def _setting(one: dict[str, Any]) -> str:
    """What is not as in most runs: warm-up, momentum, bound of MuonMERIT's ratios, rows, a split."""
    found = [] if one["warmup"] == 0.1 else [f"warm-up {one['warmup']:.0%}"]
    found += [] if one["momentum"] == MOMENTUM else [f"momentum {one['momentum']:g}"]
    if one["name"] == "muon-merit":
        found.append("ratios not bounded" if one["bound"] is None else f"ratios up to {one['bound']:g}")
        found += ["equal rows"] if one["equal_rows"] else []
    found += ["query, key and value split"] if "split" in one["changed"] else []
    return ", ".join(found)


def tried(
    size: str, *, batch: int = 512, steps: int = 200, text: str = "enwik8", **where: Any
) -> pl.DataFrame:
    """What was tried at a size with the usual decay and schedule."""
    (width,) = (width for width, name in SIZES.items() if name == size)
    found = series(
        width=width, batch=batch, steps=steps, text=text, weight_decay=0.1, schedule="cosine", **where
    )
    return found.sort(ORDER, "lr", "rates", "setting")


def lowest(found: pl.DataFrame, seeds: int = 1) -> dict[str, Any] | None:
    """The lowest mean of those with so many seeds; of means within 0.01 that of the most seeds."""
    enough = found.filter(pl.col("num_seeds") >= seeds)
    level = enough.filter(pl.col("mean") < pl.col("mean").min() + 0.01)
    return next(level.sort("num_seeds", "mean", descending=[True, False]).iter_rows(named=True), None)


def by_seed(one: dict[str, Any]) -> dict[int, float]:
    """The losses of a series by their seeds."""
    return dict(zip(one["seeds"], one["losses"], strict=True))


def curve(run: str, column: str) -> list[tuple[int, float]]:
    """What a run logged, by step."""
    steps = table().steps.filter(pl.col("run") == run).select("step", column).drop_nulls()
    return list(steps.iter_rows())


def steps_to(names: Iterable[str], loss: float) -> float | None:
    """The mean steps of runs to a validation loss, interpolated; None where one does not get there."""
    steps = []
    for name in names:
        points = curve(name, "validation_loss")
        found = next(((a, b) for a, b in pairwise(points) if b[1] <= loss), None)
        if found is None:
            return None
        (before, high), (after, low) = found
        steps.append(before + (after - before) * (high - loss) / (high - low))
    return sum(steps) / len(steps)


def as_table(frame: pl.DataFrame, *columns: str, num_text: int = 1) -> Table:
    """Columns of a frame under their titles, and a dash where there is no value."""

    def cell(column: str, value: Any) -> str:
        if isinstance(value, str):
            return DISPLAY_NAMES.get(value, value)
        return NOTHING if value is None else format(value, FORMATS.get(column, "g"))

    columns = columns or tuple(frame.columns)
    rows = (tuple(map(cell, columns, row)) for row in frame.select(columns).iter_rows())
    return Table(tuple(TITLES.get(column, column) for column in columns), tuple(rows), num_text=num_text)
