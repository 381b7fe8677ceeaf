"""The pictures of an arena: losses over the steps at the best settings, and how these were found."""

from __future__ import annotations

import math

from merit_lab.arena.board import Board, Standing
from merit_lab.arena.plan import Arena, Runs
from merit_lab.report.curves import finite
from merit_lab.report.figures import unchecked
from merit_lab.study.charts import Axis, Chart, curve_chart, line_chart

_LOSS = Axis("validation loss (nats per token)", ".3f")


def curves(board: Board) -> Chart:
    """The validation loss of each contestant."""
    lines = {
        own.name: [
            (run.name, losses, run.status == "diverged")
            for run in own.runs.values()
            if (losses := finite(run.curves.get("validation_loss", [])))
        ]
        for own in board.standings
    }
    with unchecked():
        return curve_chart(
            lines,
            _optimizers(board),
            _LOSS,
            name=f"loss-batch{board.batch}",
            title=f"Validation loss at the best settings, batch {board.batch}",
            caption="Thin lines are single seeds, thick ones their mean. The first losses, of models that "
            "know next to nothing, are left out.",
            is_loss=True,
        )


def tuning(arena: Arena, runs: Runs, board: Board) -> Chart:
    """The loss of every tuning run against its learning rate; lines join those that differ in it alone."""
    with unchecked():
        return line_chart(
            {own.name: _tuned(arena, runs, own) for own in board.standings},
            _optimizers(board),
            Axis("peak learning rate", "~g", logarithmic=True),
            _LOSS,
            name=f"tuning-batch{board.batch}",
            title=f"Tuning, batch {board.batch}",
            caption="Every tuning run with its learning rate. Lines join runs whose other settings are the "
            "same. Runs that diverged are not shown.",
            average=False,
        )


def _optimizers(board: Board) -> dict[str, str]:
    return {own.name: own.contestant.optimizer.name for own in board.standings}


def _tuned(arena: Arena, runs: Runs, own: Standing) -> list[tuple[str, list[tuple[float, float]], bool]]:
    """A line for each choice of the settings beside the learning rate."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in own.search.tried:
        loss = runs.loss(arena.trial(own.contestant, point, arena.seeds[0]))
        if loss is not None and math.isfinite(loss):
            others = ", ".join(f"{value:g}" for value in point.values[1:])
            lines.setdefault(f"{own.name} {others}", []).append((point.values[0], loss))
    return [(name, sorted(points), False) for name, points in lines.items()]
