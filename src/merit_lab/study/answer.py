"""What answers of studies share: the loss of a run, and who ends lowest of several series."""

from __future__ import annotations

import math
from collections.abc import Sequence

import polars as pl

from merit_lab.results import statistic
from merit_lab.results.page import Section
from merit_lab.tables import NOTHING, Table

LOSS = (
    pl.when(pl.col("status") == "diverged")
    .then(math.inf)
    .when(pl.col("status") == "finished")
    .then(pl.col("validation_loss").fill_nan(math.inf))
)
"""The final loss of a run: infinite if it diverged, null if it is not over."""

_SHOWN = ("Series", "Runs", "Validation loss", "± of its text", "Tokens/s", "Largest logit at the end")


def ranking(runs: pl.DataFrame, steps: pl.DataFrame) -> tuple[list[Section], str]:
    """Sections on series, the lowest first, and a summary of them: for each kind of conditions apart.

    ``runs`` are those of a table with the columns of ``results.series.with_series``.
    """
    from merit_lab.results import charts, report  # altair takes a second to import

    sections, summaries = [], []
    ordered = runs.with_columns(LOSS.mean().over("conditions", "series").alias("mean"))
    ordered = ordered.sort("mean", "series", "seed", nulls_last=True)
    groups = ordered.partition_by("conditions", maintain_order=True)
    for place, alike in enumerate(groups, start=1):
        of_these, suffix = (f" of {alike['conditions'][0]}", f"-{place}") if len(groups) > 1 else ("", "")
        said = "No series finished with all of its seeds."
        if ends := alike["mean"].is_finite().any():
            said = report.summary(alike)
        summaries.append(f"{alike['conditions'][0]}: {said}" if of_these else said)
        caption = "Means over the finished runs, ± the standard deviation over seeds, in nats per token."
        sections.append(Section(f"Leaderboard{of_these}", report.outcome(alike).only(_SHOWN), caption))
        if len(names := alike["series"].unique(maintain_order=True)) > 1:
            caption = (
                "The row minus the column, paired over seeds, with intervals that hold all at once with 95%. "
                "One with 0 in it says that the two are level."
            )
            sections.append(Section(f"All pairs{of_these}", _pairs(alike, names.to_list()), caption))
        if ends:
            drawn = [
                charts.curves(alike, steps, against=by, name=f"loss-{by}{suffix}", title=f"Loss against {by}")
                for by in ("step", "tokens", "seconds")
            ]
            caption = "Thin lines are seeds, thick ones their means; a cross is where a run diverged."
            sections.append(Section(f"Curves{of_these}", drawn, caption))
    return sections, "\n".join(summaries)


def _pairs(runs: pl.DataFrame, names: Sequence[str]) -> Table:
    """The matrix of all differences."""
    cells = {}
    for row in statistic.differences(runs).to_dicts():
        first, second, mean, low, high = (row[key] for key in ("first", "second", "mean", "low", "high"))
        cells[first, second], cells[second, first] = _signed(mean, low, high), _signed(-mean, -high, -low)
    rows = ((name, *(cells.get((name, other), NOTHING) for other in names)) for name in names)
    return Table(("", *names), tuple(rows))


def _signed(mean: float, low: float, high: float) -> str:
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" if math.isfinite(high) else f"{mean:+.3f}"
