"""The tables of models of 10M to 98M parameters, made from the frame of series."""

import math
from typing import Any

import polars as pl
from evidence_runs import (
    BOUND,
    MOMENTUM,
    RESULTS,
    SIZES,
    Row,
    as_table,
    by_seed,
    lowest,
    runs,
    series,
    steps_to,
    tried,
)

from merit_lab.results import statistic
from merit_lab.results.names import DISPLAY_NAMES as NAMES
from merit_lab.results.statistic import with_error
from merit_lab.runs import table as runs_table
from merit_lab.tables import NOTHING, Table

CONTESTANTS = ("adamw", "lamb-uncorrected", "merit", "muon", "normuon", "muon-merit")
EVERYONE = (*CONTESTANTS[:3], "lion", "orscale", "soap", "soap-merit", *CONTESTANTS[3:])
SEQUENCES = 200 * 512  # in a run of enwik8, whatever its batch
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
SCALED = ("adamw", "muon", "muon-merit")  # optimizers that were run at every batch


def tuned_at(size: str, name: str) -> pl.DataFrame:
    """What was tried to tune an optimizer at a size: rates, warm-up, momentum, bound and rows."""
    return tried(size, name=name, changed="")


def plain(found: pl.DataFrame) -> Row | None:
    """The lowest of those that are as most runs in all but the rates, of those with the most seeds."""
    alike = found.filter(
        pl.col("changed") == "",
        pl.col("momentum") == MOMENTUM,
        ~pl.col("equal_rows") | (pl.col("name") != "muon-merit"),
        pl.col("bound").is_null() | (pl.col("bound") == BOUND),
    )
    order = (-pl.col("num_seeds").cast(pl.Int64), pl.col("bound").is_null(), "mean")
    return next(alike.sort(*order).iter_rows(named=True), None)


def in_arena() -> dict[str, Row]:
    """The settings that an arena chose: those with the most seeds, since it tunes with one."""
    found = series(runs().filter(pl.col("study") == "arena/10m")).sort("num_seeds", descending=True)
    chosen = found.unique("name", keep="first", maintain_order=True).sort("mean", descending=True)
    return {one["name"]: one for one in chosen.iter_rows(named=True)}


def gap(one: Row, other: Row | None) -> str:
    """How far a mean is above another's, with its 95% interval over seeds where both have three."""
    if other is None or one["runs"] == other["runs"]:
        return NOTHING
    if min(one["num_seeds"], other["num_seeds"]) < 3:
        return f"{one['mean'] - other['mean']:z.2f}"
    found = statistic.paired(by_seed(one), by_seed(other))
    return f"{found.mean:z.2f} ({found.low:z.2f} to {found.high:z.2f})"


def share(one: Row, other: Row | None) -> str:
    """Steps to another's final loss, as a share of all steps."""
    same = other is None or one["runs"] == other["runs"]
    steps = None if same else steps_to(one["runs"], other["mean"])
    return NOTHING if steps is None else f"{steps / one['steps']:.2f}"


def tuned() -> Table:
    """The lowest loss of each optimizer at each size, of all settings and of those with three seeds."""
    rows = []
    for size in SIZES.values():
        found = {name: tuned_at(size, name) for name in EVERYONE}
        muon, adamw = (lowest(found[name]) for name in ("muon", "adamw"))
        for name, settings in found.items():
            both = {one["rates"]: one for one in (lowest(settings), lowest(settings, seeds=3)) if one}
            for one in both.values():
                ours = lowest(found["muon-merit"], seeds=min(one["num_seeds"], 3))
                how = ", ".join(filter(None, (one["rates"], one["setting"])))
                seeds = (str(settings.height), str(one["num_seeds"]))
                steps = (share(one, muon), share(one, adamw))
                rows.append((size, NAMES[name], how, *seeds, one["shown"], gap(one, ours), *steps))
    head = ("Size", "Optimizer", "Learning rate, setting", "Tried", "Seeds", "Validation loss")
    return Table((*head, "Above MuonMERIT", "Steps to Muon's loss", "To AdamW's"), tuple(rows), num_text=3)


def budgets() -> Table:
    """What an arena found: the best settings of each optimizer, and how far they are above MuonMERIT's."""
    chosen = in_arena()
    ours, muon, adamw = (chosen[name] for name in ("muon-merit", "muon", "adamw"))
    how = ("name", "rates", "warmup", "weight_decay", "shown")
    rest = [(gap(one, ours), share(one, muon), share(one, adamw)) for one in chosen.values()]
    head = ("Above MuonMERIT", "Steps to Muon's loss", "Steps to AdamW's")
    columns = [pl.Series(name, values) for name, values in zip(head, zip(*rest, strict=True), strict=True)]
    return as_table(pl.DataFrame(list(chosen.values())).select(how).with_columns(columns))


def best_at(batch: int, name: str) -> Row | None:
    """The best of an optimizer at 10M with a batch, after as many tokens as with all others."""
    # AdamW with 64 was run for the paper's comparison, with the paper's warm-up: 32 of 1600 steps.
    warmup = 0.02 if (name, batch) == ("adamw", 64) else 0.1
    return plain(tried("10M", name=name, batch=batch, steps=SEQUENCES // batch, warmup=warmup))


def batches() -> Table:
    """Validation loss after as many tokens, by batch."""
    rows = []
    for batch in BATCHES:
        cells = [best_at(batch, name) for name in SCALED]
        shown = (f"{one['shown']} ({one['rates']})" if one else NOTHING for one in cells)
        rows.append((f"{batch}", f"{SEQUENCES // batch}", *shown))
    return Table(("Batch", "Steps", *(NAMES[name] for name in SCALED)), tuple(rows))


def at_papers_batch(name: str) -> Row | None:
    """The best of an optimizer on GPT-2 small at the paper's batch."""
    return plain(tried("98M", name=name, batch=1024, steps=400, warmup=0.05, text="mix"))


def longer(size: str) -> Table:
    """Four times as many steps, on a text that is read twice."""
    found = tried(size, name=(*CONTESTANTS, "maxlamb"), steps=800, text="mix")
    columns = ("name", "setting", "rates", "num_seeds", "shown", "logit", "entropy")
    return as_table(found, *columns, num_text=2)


def entropies() -> Table:
    """How far runs end above the best of their kind, by how much of their attention entropy is left."""
    kind = [column for column in runs().columns if column.startswith("model.")]
    kind += ["batch", "steps", "name", "text"]
    # Not those of scaling studies, which end at a given loss.
    whole = ~pl.col("run").str.contains(r"-to[\d.]+-") & (pl.col("last_step") == pl.col("steps"))
    found = (
        runs()
        .filter(whole, ~pl.col("study").str.starts_with("arena"), pl.col("num_entropies") > 1)
        .filter(pl.len().over(kind) > 1)
        .with_columns(gap=pl.col("validation_loss") - pl.col("validation_loss").min().over(kind))
    )
    rows = []
    for low, high in ((0.0, 0.25), (0.25, 0.4), (0.4, 0.6), (0.6, math.inf)):
        gaps = found.filter(pl.col("entropy_left").is_between(low, high, closed="left"))["gap"]
        ends = f"{low:.0%} to {high:.0%}" if math.isfinite(high) else f"{low:.0%} and more"
        rows.append((ends, f"{len(gaps)}", f"{(gaps <= 0.05).sum()}", f"{gaps.median():.2f}"))
    return Table(("Entropy left", "Runs", "Within 0.05 of the best", "Median above the best"), tuple(rows))


OLDER = {"warmup": 0.1, "equal_rows": False, "changed": ""}  # MuonMERIT as it was in most runs


def bounds() -> Table:
    """MuonMERIT at one rate with the ratios bounded: the loss, and the largest attention logit."""
    settings = [*((size, 200, "enwik8") for size in SIZES.values()), ("10M", 800, "mix")]
    found = pl.concat(
        tried(size, steps=steps, text=text, name="muon-merit", lr=0.04, rate_scale=3.2, **OLDER)
        .filter(pl.col("momentum").is_in([0.9, MOMENTUM]))
        .sort("momentum", descending=True)
        .with_columns(size=pl.lit(size), bound=pl.col("bound").cast(pl.String).fill_null("No bound"))
        for size, steps, text in settings
    )
    cell = pl.struct("shown", "logit").map_elements(
        lambda one: f"{one['shown']} ({one['logit']:,.0f})", pl.String
    )
    wide = found.with_columns(cell=cell).pivot(
        "bound", index=["size", "steps", "text", "momentum"], values="cell"
    )
    columns = ("size", "steps", "text", "momentum", "No bound", "0.2", "0.1", "0.05")
    return as_table(wide, *columns, num_text=3)


def rates() -> Table:
    """MuonMERIT's loss by its two rates, with the momentum of before, no bound and no equal rows."""
    found = pl.concat(
        tried(size, name="muon-merit", momentum=MOMENTUM, **OLDER).with_columns(size=pl.lit(size))
        for size in SIZES.values()
    ).filter(pl.col("bound").is_null())
    found = found.with_columns(pl.col("rate_scale").fill_null(0.4)).sort("rate_scale", maintain_order=True)
    wide = found.pivot("rate_scale", index=["size", "lr"], values="shown").sort("size", "lr")
    return as_table(wide.rename(lambda name: f"`rate_scale` {name}" if name == "0.2" else name))


def rest_rates() -> Table:
    """MuonMERIT at 10M with each pair of rates for embeddings and norms: the loss at the end."""

    def rate_of(kind: str) -> pl.Expr:
        said = pl.col("changed").str.extract(rf"\*{kind}\*:lr=([\d.]+)").cast(pl.Float64)
        return pl.coalesce(said / pl.col("lr"), "rate_scale").round(6)

    found = series(study="directions/10m-rest").with_columns(
        rate_of("embedding").alias("`rate_scale` of embeddings")
    )
    found = found.with_columns(norms=rate_of("norm")).sort("norms", "`rate_scale` of embeddings")
    wide = found.pivot("norms", index="`rate_scale` of embeddings", values="shown")
    return as_table(wide.rename(lambda name: name if name.startswith("`") else f"Norms at {name}"))


def equal_rows() -> Table:
    """MuonMERIT with and without equal rows, otherwise alike."""
    rows = []
    for size in SIZES.values():
        for steps, text in ((200, "enwik8"), (800, "mix")):
            where = {"name": "muon-merit", "changed": "", "momentum": 0.9, "bound": 0.1}
            found = tried(size, steps=steps, text=text, **where)
            without = found.filter(~pl.col("equal_rows")).rows_by_key(["rates", "warmup"], named=True)
            for one in found.filter("equal_rows").sort("warmup").iter_rows(named=True):
                for other in without.get((one["rates"], one["warmup"]), ()):
                    how = (size, f"{steps:,}, {text}", one["rates"], f"{one['warmup']:.0%}")
                    seeds = f"{other['num_seeds']}, {one['num_seeds']}"
                    rows.append((*how, seeds, other["shown"], one["shown"], gap(other, one)))
    head = ("Size", "Steps", "Learning rate", "Warm-up", "Seeds", "Rows as they are", "Equal rows")
    return Table((*head, "Gain"), tuple(rows), num_text=2)


PARTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one ratio for each weight (`element_wise=False`)": {"changed": "element_wise=False"},
    "without the weight-wise bound": {"changed": "weight_bound=False"},
    "without the clip": {"changed": "clip=null"},
    "Euclidean norms (`norm=\"l2\"`)": {"changed": "norm=l2"},
    "momentum 0.85": {"momentum": 0.85},
    "momentum 0.9": {"momentum": 0.9},
    "momentum 0.98": {"momentum": 0.98},
    "without Nesterov's look ahead": {"changed": "nesterov=False"},
    "three Newton-Schulz steps for five": {"changed": "ns_steps=3"},
    "query, key and value split (`split=3`)": {"changed": "*query_key_value*:split=3"},
}  # fmt: skip


def parts() -> Table:
    """MuonMERIT at 10M with one option changed, against the same seeds unchanged."""
    rows, base = [], None
    for label, changed in PARTS.items():
        where = OLDER | {"momentum": MOMENTUM} | changed
        found = tried("10M", name="muon-merit", lr=0.04, rate_scale=3.2, **where)
        (one,) = found.filter(pl.col("bound").is_null()).iter_rows(named=True)
        base = base or one
        gaps = [loss - by_seed(base)[seed] for seed, loss in by_seed(one).items()]
        change = NOTHING if one is base else f"{sum(gaps) / len(gaps):+.3f}"
        rows.append((label, str(one["num_seeds"]), one["shown"], change))
    return Table(("MuonMERIT", "Seeds", "Validation loss", "Difference"), tuple(rows))


def _measured(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else with_error(value, error)


CHANCE = {"arc_easy": 1 / 4, "hellaswag": 1 / 4, "race": 1 / 4, "copa": 1 / 2, "wic": 1 / 2}
SHOWN = (
    ("lambada", "perplexity", "LAMBADA perplexity"),
    ("lambada", "acc", "LAMBADA"),
    ("wikitext", "bits_per_byte", "WikiText-2 bits per byte"),
    ("arc_easy", "acc", "ARC easy"),
    ("hellaswag", "acc_norm", "HellaSwag"),
    ("race", "acc", "RACE"),
    ("copa", "acc", "COPA"),
    ("wic", "acc", "WiC"),
)


def zero_shot() -> Table:
    """The evaluations of the checkpoints at the end of 800 steps at 98M."""
    columns = [("", *(label for *_, label in SHOWN))]
    found = {one["runs"][0]: one for one in series(study="mix/98m").iter_rows(named=True)}
    evaluated = runs_table.read(RESULTS / "mix/98m").runs.filter(pl.col("evaluate.step").is_not_null())
    for run in evaluated.iter_rows(named=True):
        one = found[run["run"]]
        title = f"{NAMES[one['name']]}, {one['shown']}" + ", equal rows" * ("equal" in one["setting"])
        names = [f"evaluate.{name}.{metric}" for name, metric, _ in SHOWN]
        columns.append((title, *(_measured(run[name], run.get(f"{name}_stderr")) for name in names)))
    columns.append(("By chance", *(f"{CHANCE[name]:g}" if name in CHANCE else NOTHING for name, *_ in SHOWN)))
    head, *rows = zip(*columns, strict=True)
    return Table(head, tuple(rows))
