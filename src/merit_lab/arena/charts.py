"""The charts of an arena: loss curves at the best settings, and the tuning runs."""

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
        standing.name: [
            (run.name, losses, run.status == "diverged")
            for run in standing.runs.values()
            if (losses := finite(run.curves.get("validation_loss", [])))
        ]
        for standing in board.standings
    }
    with unchecked():
        return curve_chart(
            lines,
            _optimizers(board),
            _LOSS,
            name=f"loss-batch{board.batch}",
            title=f"Validation loss at the best settings, batch {board.batch}",
            caption="Thin lines are single seeds, thick lines their means. The high losses at the beginning "
            "are left out.",
            is_loss=True,
        )


def tuning(arena: Arena, runs: Runs, board: Board) -> Chart:
    """The loss of every tuning run against its learning rate; lines join runs that differ in nothing else."""
    with unchecked():
        return line_chart(
            {standing.name: _tuned(arena, runs, standing) for standing in board.standings},
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
    return {standing.name: standing.task.optimizer.name for standing in board.standings}


def _tuned(arena: Arena, runs: Runs, standing: Standing) -> list[tuple[str, list[tuple[float, float]], bool]]:
    """A line for each combination of the settings other than the learning rate."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in standing.search.tried:
        loss = runs.loss(arena.trial(standing.task, point, arena.seeds[0]))
        if loss is not None and math.isfinite(loss):
            others = ", ".join(f"{value:g}" for value in point.values[1:])
            lines.setdefault(f"{standing.name} {others}", []).append((point.values[0], loss))
    return [(name, sorted(points), False) for name, points in lines.items()]
