"""What answers of studies share: the ranking of series with equal conditions, and how a page is printed."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from merit_lab.results import statistic
from merit_lab.results.page import Page, Section
from merit_lab.tables import NOTHING, Table, print_table
from merit_lab.text import amount, count_seeds, join

LOSS = (
    pl.when(pl.col("status") == "diverged")
    .then(math.inf)
    .when(pl.col("status") == "finished")
    .then(pl.col("validation_loss").fill_nan(math.inf))
)
"""The final loss of a run: infinite if it diverged, null if it is not over."""


class Ranking(NamedTuple):
    """Who ends lowest: sections of a page, its summary and warnings, and the series from the lowest up."""

    sections: list[Section]
    summary: str
    warnings: list[str]
    order: list[str]


def rank(runs: pl.DataFrame, steps: pl.DataFrame) -> Ranking:
    """Rank the series of runs with equal conditions; see ``results.series.with_series``."""
    counted = runs.filter(pl.col("left_out").is_null()).with_columns(LOSS.alias("loss")).drop_nulls("loss")
    board = counted.group_by("series").agg(
        pl.col("loss").mean(),
        pl.len().alias("seeds"),
        pl.col("seed").filter(pl.col("loss").is_infinite()).sort().alias("lost"),
        pl.col("tokens_per_second").median(),
        pl.col("largest_logit").max(),
    )
    rows = board.sort("loss", "series").to_dicts()
    pairs: dict[tuple[str, str], str] = {}
    ties = []
    for row in statistic.differences(counted).to_dicts():
        first, second = row["first"], row["second"]
        pairs[first, second], pairs[second, first] = _interval(row, 1), _interval(row, -1)
        if first == rows[0]["series"] and math.isfinite(row["mean"]) and not row["high"] < 0:
            ties.append(second)
    order = [row["series"] for row in rows]
    sections = [
        Section(
            "Leaderboard",
            _leaderboard(rows, pairs),
            "Mean final validation loss, in nats per token, and the difference to the first with its "
            "interval, paired over seeds; all intervals of a page hold at once with 95% confidence.",
        )
    ]
    if len(order) > 1:
        matrix = tuple((name, *(pairs.get((name, other), NOTHING) for other in order)) for name in order)
        caption = "The row minus the column, with the interval."
        sections.append(Section("All pairs", Table(("", *order), matrix), caption))
    if counted["loss"].is_finite().any():
        from merit_lab.results import charts  # altair takes a second to import

        drawn = [
            charts.curves(counted, steps, against=one, name=f"loss-{one}", title=f"Loss against {one}")
            for one in ("step", "tokens", "seconds")
        ]
        caption = "Thin lines are seeds, thick ones their means; a cross is where a run diverged."
        sections.append(Section("Curves", drawn, caption))
    lost = [
        f"{row['series']} diverged with seed {join(list(map(str, row['lost'])))}."
        for row in rows
        if row["lost"]
    ]
    return Ranking(sections, _summary(rows, ties), lost, order)


def _summary(rows: Sequence[Mapping[str, Any]], ties: Sequence[str]) -> str:
    if not rows or not math.isfinite(rows[0]["loss"]):
        return "No optimizer finished with all of its seeds."
    text = f"{rows[0]['series']} ends lowest, at {rows[0]['loss']:.3f} ({count_seeds(rows[0]['seeds'])})"
    if ties:
        return f"{text}; {join(ties)} cannot be told from it by these seeds."
    return f"{text}, below all others." if len(rows) > 1 else f"{text}."


def _leaderboard(rows: Sequence[Mapping[str, Any]], pairs: Mapping[tuple[str, str], str]) -> Table:
    head = ("Optimizer", "Loss", "Seeds", "Above the first", "Tokens/s", "Largest logit")
    cells = (
        (
            row["series"],
            f"{row['loss']:.3f}" if math.isfinite(row["loss"]) else "diverged",
            str(row["seeds"]),
            pairs.get((row["series"], rows[0]["series"]), NOTHING),
            NOTHING if row["tokens_per_second"] is None else amount(row["tokens_per_second"]),
            NOTHING if row["largest_logit"] is None else f"{row['largest_logit']:.3g}",
        )
        for row in rows
    )
    return Table(head, tuple(cells))


def _interval(row: Mapping[str, Any], sign: int) -> str:
    """A difference and its interval; with a sign of -1 that of the second to the first."""
    mean = sign * row["mean"]
    if not math.isfinite(mean):
        return "diverged"
    if not math.isfinite(row["high"]):
        return f"{mean:+.3f}"
    low, high = sorted((sign * row["low"], sign * row["high"]))
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def show(page: Page, command: str) -> None:
    """Print the tables of the sections that are not folded, the caveats, and the answer."""
    for section in page.sections:
        for part in section.parts:
            if isinstance(part, Table) and not section.folded:
                print_table(part)
    for warning in page.warnings:
        print(f"{command}: {warning}", file=sys.stderr)
    print(f"\n{page.summary}")


def unfinished(runs: pl.DataFrame) -> list[str]:
    """A remark on the runs that do not count, if there are any."""
    left = runs.filter(pl.col("left_out").is_not_null())
    return [f"{row['run']} does not count: {row['left_out']}." for row in left.to_dicts()]
