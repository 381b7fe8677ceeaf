"""The page of any runs; each of its parts is a query of the two frames of the runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from merit_lab.results import charts
from merit_lab.results.names import display_names
from merit_lab.results.page import Page, Section
from merit_lab.results.series import makes_a_series, shown_as, with_series
from merit_lab.results.statistic import differences, with_error
from merit_lab.runs import table
from merit_lab.tables import NOTHING, Table
from merit_lab.text import amount, count_seeds, join

_MOST_DRAWN = 10  # series in a chart
_MOST_NAMED = 3  # in a list of a sentence
_MOST_OPEN = 15  # pairs in a table that is not folded
_MOST_PAIRS = 200
_MOST_DETAILED = 3  # conditions with all curves; of more, only the losses are drawn
_COLLAPSED = 0.25  # of the entropy at the start: runs that ended below were far from their optimizer's best
_NORMAL = 1.96  # standard errors of a mean that hold 95%
_PRIVATE = ("command", "folder", "host", "data.folder", "optimizer", "started")


def _curve(value: str, title: str, unit: str, caption: str = "", **how: Any) -> Mapping[str, Any]:
    """A column of the frame of steps, and how it is drawn."""
    return {"value": value, "title": title, "y_title": unit, "caption": caption, "against": "step", **how}


_TOKEN, _PART = "nats per token", "share of elements"
LOSSES = (
    _curve("validation_loss", "Validation loss", _TOKEN, "Mean cross-entropy on the validation set."),
    _curve("validation_loss", "Validation loss over tokens", _TOKEN, against="tokens"),
    _curve(
        "validation_loss",
        "Validation loss over time",
        _TOKEN,
        "Of each run's own machine.",
        against="seconds",
    ),
)
_CURVES = (
    *LOSSES,
    _curve("training_loss", "Training loss", _TOKEN, "Mean cross-entropy on the batch of the step."),
    _curve("max_logit", "Largest attention logit", "logit", "Over all layers and heads.", wide=True),
    _curve("entropy", "Attention entropy", "nats", "Mean over heads. At 0 each token attends to one."),
    _curve("entropy_lowest", "Lowest attention entropy", "nats", "Of the head with the lowest."),
    _curve("clipped", "Share clipped", _PART, "Elements whose scaled update exceeded the clip.", zero=True),
    _curve("bounded", "Share bounded", _PART, "Elements whose ratio the bound decided.", zero=True),
    _curve("relative_change", "Change of a step", "share of the norm", "Mean over parameters.", zero=True),
    _curve("grad_norm", "Gradient norm", "norm", "Over all parameters, before clipping.", wide=True),
    _curve("weight_norm", "Weight norm", "norm", "Over all parameters.", zero=True),
    _curve("lr", "Learning rate", "learning rate", "Not comparable between optimizers.", zero=True),
    _curve("tokens_per_second", "Throughput", "tokens per second", zero=True),
)


def report(of: table.Table) -> Page:
    """The page of these runs: their outcome, differences, curves, measurements and settings."""
    if of.steps.is_empty():
        names = join(of.runs["run"].to_list())
        raise ValueError(f"nothing to report: no measurements recorded yet by {names}")
    runs = with_series(of.runs)
    conditions = runs["conditions"].unique(maintain_order=True)
    shown = _CURVES if len(conditions) <= _MOST_DETAILED else _CURVES[:1]
    sections, summaries = ranked(runs, of.steps, shown)
    if len(conditions) > 1:
        several = f"Runs with {len(conditions)} kinds of conditions; only those of one are compared."
        summaries = [several, *summaries]
    sections += measurements(runs)
    sections.append(Section(f"Every run ({len(runs)})", every_run(runs), "Last values.", folded=True))
    sections += settings(runs)
    optimizers = display_names(runs["optimizer.name"].unique(maintain_order=True))
    devices = dict.fromkeys(_values(runs, "environment.device.name"))
    return Page(
        title=join(list(optimizers.values())),
        facts=[*(conditions if len(conditions) == 1 else ()), *devices],
        summary="\n".join(summaries),
        sections=sections,
        warnings=warnings(runs, of.steps),
        runs=runs,
    )


def ranked(
    runs: pl.DataFrame,
    steps: pl.DataFrame,
    shown: Sequence[Mapping[str, Any]],
    title: str = "Outcome",
    columns: Sequence[str] = (),
) -> tuple[list[Section], list[str]]:
    """Sections on the series in their order, with these curves, and what they say, for each conditions."""
    sections, summaries = [], []
    groups = runs.partition_by("conditions", maintain_order=True)
    for place, alike in enumerate(groups, start=1):
        conditions = alike["conditions"][0]
        of_these, suffix = (f" of {conditions}", f"-{place}") if len(groups) > 1 else ("", "")
        summaries.append(f"{conditions}: {summary(alike)}" if of_these else summary(alike))
        ends = outcome(alike)
        caption = "Means over the finished runs, ± the standard deviation over seeds. Loss in nats per token."
        sections.append(Section(f"{title}{of_these}", ends.only(columns) if columns else ends, caption))
        sections += compared(alike, of_these)
        sections += _drawn(alike, steps, shown, of_these, suffix)
    return sections, summaries


def summary(runs: pl.DataFrame) -> str:
    """What the last losses of runs with equal conditions allow to say, and what failed or does not count."""
    counted = runs.filter(pl.col("left_out").is_null())
    finished, diverged = (counted.filter(status=status) for status in ("finished", "diverged"))
    pairs = differences(runs)
    best = str((*pairs["first"], *finished["series"], "")[0])
    losses = _values(finished.filter(series=best), "validation_loss")
    with_best = pairs.filter((pl.col("first") == best) & pl.col("mean").is_finite())
    level = with_best.filter(pl.col("high") >= 0)["second"].to_list()
    sentences = ["No series finished with all of its seeds"]
    if losses and best not in diverged["series"]:
        ended = f"{best} ended lowest," if len(pairs) else f"{best} ended"
        sentences = [f"{ended} at {_spread(losses)} ({count_seeds(len(losses))})"]
        if level:
            sentences.append(f"{join(_few(level))} cannot be told from it by these seeds")
        elif len(with_best):
            sentences[0] += ", below all others"
    for (name,), failed in diverged.group_by("series", maintain_order=True):
        sentences.append(f"{name!s} diverged at step {join([str(step) for step in failed['last_step']])}")
    left_out = [f"{row['run']} ({row['left_out']})" for row in runs.drop_nulls("left_out").to_dicts()]
    if left_out:
        sentences.append(f"not counted: {join(_few(left_out))}")
    return f"{'; '.join(sentences)}."


def outcome(runs: pl.DataFrame) -> Table:
    """A row for each series: means over the finished runs, ± the standard deviation over seeds."""
    rows = []
    for (series,), alike in runs.group_by("series", maintain_order=True):
        finished = alike.filter(pl.col("left_out").is_null() & (pl.col("status") == "finished"))
        statuses = alike["status"].to_list()
        rows.append(
            {
                "Series": str(series),
                "Runs": ", ".join(f"{statuses.count(one)} {one}" for one in dict.fromkeys(statuses)),
                "Validation loss": _spread(_values(finished, "validation_loss")),
                "± of its text": _spread([_NORMAL * one for one in _values(finished, "loss_error")][:1]),
                "Bits per byte": _spread(_values(finished, "bits_per_byte")),
                "Training loss": _spread(_values(finished, "training_loss")),
                "Largest logit at the end": _spread(_values(finished, "max_logit"), 1),
                "At any time": _spread(_values(finished, "largest_logit"), 1),
                "Tokens/s": _speed(finished["tokens_per_second"].median()),
            }
        )
    return _without_empty_columns(rows, num_text=2)


def compared(runs: pl.DataFrame, of_these: str = "") -> list[Section]:
    """The differences of all pairs of series with equal conditions, the lower one first."""
    pairs = differences(runs)
    if pairs.is_empty():
        return []
    caption = (
        "Validation loss of the higher minus that of the lower, paired over the seeds that both have. The "
        "intervals hold for all pairs at once with 95%; one with 0 in it says that the two are level."
    )
    if len(pairs) > _MOST_PAIRS:
        caption += f" Of {len(pairs):,} pairs, those of the lowest series."
        pairs = pairs.filter(pl.col("first") == pairs["first"][0])
    rows = tuple(
        (
            row["first"],
            row["second"],
            _number(-row["mean"], 4) if math.isfinite(row["mean"]) else "diverged",
            _interval(-row["high"], -row["low"]),
            str(row["seeds"]),
        )
        for row in pairs.to_dicts()
    )
    head = ("Lower", "Higher", "Difference", "95% interval", "Seeds")
    folded = len(rows) > _MOST_OPEN
    return [Section(f"Differences{of_these}", Table(head, rows, num_text=2), caption, folded=folded)]


def measurements(runs: pl.DataFrame) -> list[Section]:
    """Evaluations, curvature and noise, with a column for each series that has some."""
    kinds = ("evaluate.", "curvature.", "noise.")
    names = [
        name
        for name, kind in runs.schema.items()
        if name.startswith(kinds)
        and kind.is_numeric()
        and "stderr" not in name
        and "standard_error" not in name
    ]
    any_of_them = pl.any_horizontal(pl.lit(False), *(pl.col(name).is_not_null() for name in names))
    counted = runs.filter(pl.col("left_out").is_null() & any_of_them)
    if counted.is_empty():
        return []
    several = counted["conditions"].n_unique() > 1
    label = pl.concat_str("series", "conditions", separator=" of ") if several else pl.col("series")
    groups = counted.with_columns(label=label).partition_by("label", maintain_order=True)
    rows = tuple((name, *(_measured(group, name) for group in groups)) for name in names)
    caption = (
        "At the last checkpoint that was measured. ± is the standard error, or of several runs the standard "
        "deviation over seeds."
    )
    head = ("Measured", *(str(group["label"][0]) for group in groups))
    return [Section("Measured at checkpoints", Table(head, rows), caption)]


def every_run(runs: pl.DataFrame) -> Table:
    """A row for each run with its last values, whatever its status."""
    rows = [
        {
            "Run": row["run"],
            "Series": row["series"],
            "Status": f"{row['status']}: {row['message']}" if row["status"] == "diverged" else row["status"],
            "Counts": row["left_out"] or "yes",
            "Seed": str(row.get("seed") or 0),
            "Steps": f"{row['last_step']:,}",
            "Validation loss": _number(row["validation_loss"]),
            "Training loss": _number(row["training_loss"]),
            "Largest logit": _number(row["largest_logit"], 1),
            "Tokens/s": _speed(row["tokens_per_second"]),
            "Minutes": _number(row["seconds"] / 60 if row["seconds"] is not None else None, 1),
        }
        for row in runs.to_dicts()
    ]
    return _without_empty_columns(rows, num_text=4)


def settings(runs: pl.DataFrame) -> list[Section]:
    """The settings and the environments: those that differ, by series, and those that all runs share."""
    environment = [name for name in runs.columns if name.startswith("environment.")]
    shown = [name for name in environment if not name.removeprefix("environment.").startswith(_PRIVATE)]
    titled = {"Settings": [name for name in runs.columns if makes_a_series(name)], "Environment": shown}
    sections = []
    for title, names in titled.items():
        differing = [name for name in names if runs[name].n_unique() > 1]
        groups = runs.partition_by("conditions", "series", maintain_order=True)
        head = ("Different", *(str(group["series"][0]) for group in groups))
        rows = tuple(
            (name.removeprefix("environment."), *(_texts(group[name]) for group in groups))
            for name in differing
        )
        shared = tuple(
            (name.removeprefix("environment."), _texts(runs[name])) for name in names if name not in differing
        )
        parts = [Table(head, rows, num_text=len(head))] if rows else []
        sections.append(Section(title, [*parts, Table(("The same in all runs", ""), shared, 2)], folded=True))
    return sections


def warnings(runs: pl.DataFrame, steps: pl.DataFrame) -> list[str]:
    """What a reader should know before trusting runs whose losses look right: attention that collapsed."""
    known = steps.filter(pl.col("entropy").is_finite()).join(runs.select("run", "series"), on="run")
    ends = known.group_by("series", "run").agg(
        pl.col("entropy").sort_by("step").first().alias("first"),
        pl.col("entropy").sort_by("step").last().alias("last"),
    )
    worst = ends.sort("last", "run").group_by("series", maintain_order=True).first()
    collapsed = [
        f"from {row['first']:.2g} to {row['last']:.2g} nats with {row['series']}"
        for row in worst.filter(pl.col("last") < _COLLAPSED * pl.col("first")).to_dicts()
    ]
    text = (
        f"The attention entropy fell {join(collapsed)}: heads attend to few tokens, as they do where the "
        "learning rate is too high; try a lower one."
    )
    return [text] if collapsed else []


def _drawn(
    runs: pl.DataFrame, steps: pl.DataFrame, shown: Sequence[Mapping[str, Any]], of_these: str, suffix: str
) -> list[Section]:
    """The charts of runs with equal conditions that have these measurements; of many series, the best."""
    caption = "Thin lines are runs, thick ones means; a cross is where a run diverged."
    means = (
        runs.group_by("series", "optimizer.name", maintain_order=True)
        .agg(pl.col("validation_loss").mean().fill_nan(None))
        .sort("validation_loss", nulls_last=True, maintain_order=True)
        .with_columns(rank=pl.int_range(pl.len()).over("optimizer.name"))
    )
    best = means.sort("rank", maintain_order=True)["series"][:_MOST_DRAWN]
    if len(means) > _MOST_DRAWN:
        caption += f" Of {len(means)} series, {_MOST_DRAWN} are drawn: the lowest of each optimizer first."
    runs = runs.filter(pl.col("series").is_in(best.to_list()))
    steps = steps.join(runs.select("run"), on="run", how="semi")
    drawn = []
    for curve in shown:
        value, against = curve["value"], curve["against"]
        if not steps.filter(pl.col(value).is_finite() & pl.col(against).is_not_null()).is_empty():
            over = "" if against == "step" else f"-{against}"
            drawn.append(charts.curves(runs, steps, name=f"{value.replace('_', '-')}{over}{suffix}", **curve))
    sections = [Section(f"Curves{of_these}", drawn, caption)] if drawn else []
    if layers := charts.layers(runs, steps, name=f"layers{suffix}") if shown is _CURVES else []:
        caption = "Mean over seeds; all series share one scale."
        sections.append(Section(f"Largest logit of each layer{of_these}", layers, caption, folded=True))
    return sections


def _values(runs: pl.DataFrame, name: str) -> list[Any]:
    return runs[name].drop_nulls().to_list() if name in runs.columns else []


def _measured(runs: pl.DataFrame, name: str) -> str:
    values, (metric, comma, answers) = _values(runs, name), name.partition(",")
    errors = [
        *_values(runs, f"{metric}_stderr{comma}{answers}"),
        *_values(runs, f"{name}.standard_error"),
    ]
    return with_error(values[0], errors[0]) if len(values) == 1 and errors else _spread(values, digits=None)


def _few(names: Sequence[str]) -> list[str]:
    """So many names as a sentence can hold."""
    if len(names) <= _MOST_NAMED:
        return list(names)
    return [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]


def _spread(values: Sequence[float], digits: int | None = 3) -> str:
    """The mean of values and, if there are several, their sample standard deviation."""
    if not values:
        return NOTHING
    mean = statistics.fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return f"{mean:.4g}" if digits is None else f"{mean:,.{digits}f}"
    deviation = statistics.stdev(values)
    return with_error(mean, deviation) if digits is None else f"{mean:,.{digits}f} ± {deviation:,.{digits}f}"


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _speed(tokens_per_second: Any) -> str:
    return NOTHING if tokens_per_second is None else amount(tokens_per_second)


def _interval(low: float, high: float) -> str:
    return f"{low:.4f} to {high:.4f}" if math.isfinite(low) and math.isfinite(high) else NOTHING


def _texts(values: pl.Series) -> str:
    """The different values of a setting."""
    texts = [
        NOTHING if one is None else shown_as(values.name, one) for one in values.unique(maintain_order=True)
    ]
    return " | ".join(texts)


def _without_empty_columns(rows: Sequence[dict[str, str]], num_text: int) -> Table:
    head = [
        name
        for place, name in enumerate(rows[0])
        if place < num_text or any(row[name] != NOTHING for row in rows)
    ]
    return Table(tuple(head), tuple(tuple(row[name] for name in head) for row in rows), num_text)
