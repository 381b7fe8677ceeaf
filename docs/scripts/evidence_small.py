"""The tables of a small model, and of batches and lengths, made from the frames of runs and steps."""

from collections.abc import Sequence

import numpy as np
import polars as pl
from evidence_runs import ORDER, as_table, curve, runs, series, steps_to

from merit_lab.results.names import DISPLAY_NAMES as NAMES
from merit_lab.study.fit import fit_curve
from merit_lab.tables import NOTHING, Table


def critical(study: str, loss: float) -> Table:
    """Steps to a loss by batch, at the best rate, and the critical batch that they give."""
    found = runs().filter(pl.col("study") == study)
    reached = pl.Series([steps_to([run], loss) for run in found["run"]], dtype=pl.Float64)
    best = found.with_columns(reached=reached).drop_nulls("reached").sort("reached")
    best = best.unique(["name", "batch"], keep="first", maintain_order=True).sort("name", "batch")
    rows = []
    for (name,), mine in best.group_by("name", maintain_order=True):
        fitted = fit_curve(list(map(float, mine["batch"])), list(mine["reached"]))
        assert fitted is not None
        batch = fitted.critical_batch
        cells = (f"{steps:.0f} ({lr:g})" for steps, lr in mine.select("reached", "lr").iter_rows())
        rows.append((NAMES[name], *cells, f"{batch.value:.0f} ({batch.low:.0f} to {batch.high:.0f})"))
    head = (f"Batch {size}" for size in sorted(set(best["batch"])))
    return Table(("Optimizer", *head, "Critical batch"), tuple(rows))


def variants() -> Table:
    """A small model with MuonMERIT's weight decay elsewhere or stronger, or its ratios smoothed."""
    changed = pl.col("changed")
    found = series(study="sizes/variants").with_columns(
        pl.col("name").str.replace(".*Variant", "muon-merit"),
        pl.coalesce(changed.str.extract(r"decay=([\d.]+)").cast(float), "weight_decay").alias("weight_decay"),
        changed.str.replace_all(r"\*[^,]*(, )?", "").str.replace("(.+)", "`$1`"),
    )
    columns = ("steps", "name", "changed", "weight_decay", "lr", "num_seeds", "shown")
    return as_table(found.sort(*columns[:5]), *columns, num_text=3)


def soap_later() -> Table:
    """A small model with Muon's direction and MERIT's ratios, and SOAP's direction from some step on."""
    found = series(study=("sizes/variants", "sizes/soap"), steps=800)
    rows = []
    for one in found.filter(pl.col("name") != "normuon").sort("lr").iter_rows(named=True):
        after = one["changed"].removeprefix("soap_after=")
        if after == "" or after.isdecimal():
            direction = {"": "Muon's", "0": "SOAP's"}.get(after, f"Muon's, after {after} steps SOAP's")
            direction = "SOAP's, without ratios" if one["name"] == "soap" else direction
            rows.append((direction, f"{one['lr']:g}", str(one["num_seeds"]), one["shown"]))
    return Table(("Direction", "Learning rate", "Seeds", "Validation loss"), tuple(sorted(rows)))


# The sweeps of a small model: what was varied, its title, and its value where something else was.
VARIED = {"width": ("Width", 64), "layers": ("Layers", 4), "batch": ("Batch", 64), "steps": ("Steps", 200)}


def sizes() -> Table:
    """The best learning rates of Muon and MuonMERIT, one size of a small model varied."""
    rows: list[tuple[str, ...]] = []
    for field, (title, _) in VARIED.items():
        usual = {name: value for name, (_, value) in VARIED.items() if name != field}
        columns = []
        for study, name in (("sizes/tiny", "muon"), ("sizes/equal", "muon-merit")):
            found = series(study=study, name=name, **usual).sort(field, "lr")
            parts = found.group_by(field, maintain_order=True)
            columns.append({value: best_rate(part.select("lr", "mean").rows()) for (value,), part in parts})
        rows += [
            (f"{title} {value}", *(cell for column in columns for cell in column[value][:2]))
            for value in columns[0]
        ]
        powers = []
        for column in columns:
            middles = [middle for *_, middle in column.values()]
            power = None if None in middles else np.polyfit(np.log(list(column)), np.log(middles), deg=1)[0]
            powers += [NOTHING if power is None else f"{title.lower()}^{power:.2f}", ""]
        rows.append((f"{title}: goes as", *powers))
    head = ("Varied", "Muon's best rate", "Muon's loss", "MuonMERIT's best rate", "MuonMERIT's loss")
    return Table(head, tuple(rows))


def best_rate(points: Sequence[tuple[float, float]]) -> tuple[str, str, float | None]:
    """The best rate, its loss, and the lowest point of a parabola through it and its neighbours."""
    place = min(range(len(points)), key=lambda place: points[place][1])
    near = points[max(place - 1, 0) : place + 2]
    rate, loss = points[place]
    if len(near) < 3:
        return f"{rate:g}", f"{loss:.3f}", None
    bend, slope, _ = np.polyfit(np.log([rate for rate, _ in near]), [loss for _, loss in near], deg=2)
    middle = float(np.exp(-slope / (2 * bend)))
    return f"{rate:g} ({middle:.2g})", f"{loss:.3f}", middle


def comparison(study: str) -> Table:
    """The runs of a comparison with one seed."""
    losses, logits = ("validation_loss", "training_loss"), ("max_logit", "largest_logit")
    return as_table(runs().filter(pl.col("study") == study).sort(ORDER), "name", "lr", *losses, *logits)


QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of a run, after which the table of long runs looks at it


def drift() -> Table:
    """Long runs of a small model: the loss, and what logits and weights do on the way with the first seed."""
    rows = []
    for one in series(study="sizes/long").iter_rows(named=True):
        how = (NAMES[one["name"]], one["schedule"], f"{one['steps']:,} of {one['batch']}", f"{one['lr']:g}")
        ends = [part * one["steps"] for part in QUARTERS]
        ways = []
        for column in ("max_logit", "weight_norm"):
            points = curve(one["runs"][0], column)
            last = [[value for step, value in points if step <= end][-1] for end in ends] if points else []
            ways.append(", ".join(f"{value:.0f}" for value in last) or NOTHING)
        rows.append((*how, one["shown"], *ways))
    when = ", ".join(f"{part:.0%}" for part in QUARTERS)
    head = ("Optimizer", "Schedule", "Steps", "Learning rate", "Validation loss")
    head = (*head, f"Largest attention logit after {when} of the steps", "Norm of the weights")
    return Table(head, tuple(sorted(rows)), num_text=2)
