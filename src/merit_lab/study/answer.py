"""What answers of studies share: the loss of a run, and who ends lowest of several series."""

from __future__ import annotations

import math

import polars as pl

from merit_lab.results.page import Section

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
    from merit_lab.results import report  # altair takes a second to import

    ordered = runs.with_columns(LOSS.mean().over("conditions", "series").alias("mean"))
    ordered = ordered.sort("mean", "series", "seed", nulls_last=True)
    sections, summaries = report.ranked(ordered, steps, report.LOSSES, "Leaderboard", _SHOWN)
    return sections, "\n".join(summaries)
