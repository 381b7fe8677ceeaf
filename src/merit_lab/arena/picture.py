"""The pictures of an arena: losses over the steps at the best settings, and how these were found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, Literal

from merit_lab.arena.board import Board, Standing
from merit_lab.arena.plan import Arena, Runs
from merit_lab.report.charts import Look, by_series
from merit_lab.report.curves import finite
from merit_lab.report.figures import unchecked
from merit_lab.study.page import Figure

_WIDTH, _HEIGHT = 640, 300


def curves(board: Board) -> Figure:
    """The validation loss of each contestant, the mean over its seeds."""
    rows = [row for own in board.standings for row in _curve(own)]
    with unchecked():
        chart = _lines(board, "step:Q", "steps", "linear")
    return Figure(
        key=f"loss-batch{board.batch}",
        title=f"Validation loss at the best settings, batch {board.batch}",
        caption="The mean over seeds. The first losses, of models that know next to nothing, are left out.",
        chart=chart,
        datasets={"points": _without_the_start(rows)},
    )


def tuning(arena: Arena, runs: Runs, board: Board) -> Figure:
    """The loss of every tuning run against its learning rate; lines join those that differ in it alone."""
    rows = [row for own in board.standings for row in _tuned(arena, runs, own)]
    with unchecked():
        chart = _lines(board, "x:Q", "peak learning rate", "log", points=True)
    return Figure(
        key=f"tuning-batch{board.batch}",
        title=f"Tuning, batch {board.batch}",
        caption="Every tuning run with its learning rate. Lines join runs whose other settings are the same. "
        "Runs that diverged are not shown.",
        chart=chart,
        datasets={"points": rows},
    )


def _curve(own: Standing) -> Iterator[dict[str, Any]]:
    by_step: dict[int, list[float]] = {}
    for run in own.runs.values():
        for step, loss in finite(run.curves.get("validation_loss", [])):
            by_step.setdefault(step, []).append(loss)
    for step, losses in by_step.items():
        yield {"series": own.name, "line": own.name, "step": step, "value": statistics.fmean(losses)}


def _without_the_start(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first losses are those of a model that knows nothing, and would flatten the rest."""
    if not rows:
        return rows
    highest, lowest = max(row["value"] for row in rows), min(row["value"] for row in rows)
    begun = [row["step"] for row in rows if row["value"] <= highest - 0.25 * (highest - lowest)]
    first = min(begun, default=0)
    return [row for row in rows if row["step"] >= first]


def _tuned(arena: Arena, runs: Runs, own: Standing) -> Iterator[dict[str, Any]]:
    for point in own.search.tried:
        loss = runs.loss(arena.trial(own.contestant, point, arena.seeds[0]))
        if loss is not None and math.isfinite(loss):
            others = ", ".join(f"{value:g}" for value in point.values[1:])
            yield {"series": own.name, "line": f"{own.name} {others}", "x": point.values[0], "value": loss}


def _lines(
    board: Board, field: str, title: str, scale: Literal["linear", "log"], *, points: bool = False
) -> dict[str, Any]:
    import altair as alt

    look = Look.of({own.name: own.contestant.optimizer.name for own in board.standings})
    legend = alt.Legend(
        orient="top", direction="horizontal", labelLimit=300, symbolType="stroke", symbolOpacity=1
    )
    colour, dash = by_series(look, look.colours, legend)
    x = alt.X(field, title=title, scale=alt.Scale(type=scale, nice=False, padding=12))
    y = alt.Y("value:Q", title="validation loss (nats per token)", scale=alt.Scale(zero=False))
    tips = ["series:N", alt.Tooltip(field, title=title, format="~g"), alt.Tooltip("value:Q", format=".4f")]
    data = alt.Chart(alt.NamedData(name="points"))
    layers = [data.mark_line(strokeWidth=2.2).encode(x, y, colour, dash, detail="line:N", tooltip=tips)]
    if points:
        layers.append(data.mark_point(size=50, filled=True, opacity=1).encode(x, y, colour, tooltip=tips))
    spec: dict[str, Any] = alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT).to_dict(validate=False)
    return spec
