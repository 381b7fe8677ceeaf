"""The charts of an arena: loss curves at the best settings, and the tuning runs along each setting."""

from __future__ import annotations

import math

from merit_lab.arena.board import Board, Standing
from merit_lab.results.figures import unchecked
from merit_lab.study.charts import Axis, Chart, Line, Lines, curve_chart, line_chart
from merit_lab.study.fields import short

_LOSS = Axis("validation loss (nats per token)", ".3f")
_TITLES = {
    "lr": "peak learning rate",
    "rest_lr": "learning rate of the rest",
    "warmup": "share of warm-up steps",
    "momentum": "momentum",
    "weight_decay": "weight decay",
}
_TUNING_CAPTION = (
    "A line joins tuning runs whose other settings are the same; where there is a separate rate of the rest, "
    "it grows with the learning rate. Runs that diverged or were given up are not shown."
)


def curves(board: Board) -> Chart:
    """The validation loss of each contestant."""
    lines = {
        standing.name: [
            (run.name, losses, run.status == "diverged")
            for run in standing.runs.values()
            if (losses := run.points("validation_loss"))
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


def tuning(board: Board) -> list[Chart]:
    """A chart for each tuned setting: the loss of the tuning runs that differ in nothing else."""
    fields = dict.fromkeys(short(axis.field) for standing in board.standings for axis in standing.task.axes)
    charts = []
    for place, field in enumerate(fields):
        lines = {standing.name: _tuned(standing, field) for standing in board.standings}
        if any(lines.values()):
            charts.append(_tuning_chart(board, lines, field, _TUNING_CAPTION if place == 0 else ""))
    return charts


def _tuning_chart(board: Board, lines: Lines, field: str, caption: str) -> Chart:
    title = _TITLES[field]
    with unchecked():
        return line_chart(
            lines,
            _optimizers(board),
            Axis(title, "~g", logarithmic=field != "momentum"),  # a momentum may be 0
            _LOSS,
            name=f"tuning-batch{board.batch}-{field.replace('_', '-')}",
            title=f"Tuning of the {title}, batch {board.batch}",
            caption=caption,
            average=False,
        )


def _optimizers(board: Board) -> dict[str, str]:
    return {standing.name: standing.task.optimizer.name for standing in board.standings}


def _tuned(standing: Standing, field: str) -> list[Line]:
    """The lines along one setting, by its short name; those of a single run are left out."""
    task = standing.task
    place = next((place for place, axis in enumerate(task.axes) if short(axis.field) == field), None)
    if place is None:
        return []
    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for point, loss in standing.tuning.items():
        if loss is not None and math.isfinite(loss):
            others = (*point.values[:place], *point.values[place + 1 :])
            value = task.settings(point)[task.axes[place].field]
            lines.setdefault(others, []).append((value, loss))
    return [
        (f"{standing.name} {', '.join(f'{value:g}' for value in others)}", sorted(points), False)
        for others, points in lines.items()
        if len(points) > 1
    ]
