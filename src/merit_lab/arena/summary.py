"""The findings of an arena as sentences and tables, computed from the leaderboards."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.arena.board import Board, Standing
from merit_lab.study.fields import LR, short
from merit_lab.tables import NOTHING, Table
from merit_lab.text import count_seeds, join

_LIKELY_CHANCE = 0.05


def summarise(boards: Sequence[Board]) -> str:
    """State the answer in one sentence for each batch size."""
    return " ".join(map(_answer, boards)) or "No contestant is tuned yet."


def _answer(board: Board) -> str:
    best = board.best
    where = f"With a batch of {board.batch}"
    if not best.is_finite:
        return f"{where} no contestant has settings with which all seeds finish."
    seeds = count_seeds(len(best.losses))
    text = f"{where} {best.name} ends lowest, at a validation loss of {best.mean:.3f} ({seeds})"
    others = [standing for standing in board.standings[1:] if standing.is_finite]
    if not others:
        return f"{text}."
    second = others[0]
    chance = board.chances[second.name]
    distance = f"{second.mean - best.mean:.3f} below {second.name}"
    if len(best.losses) == 1:
        return f"{text}, {distance}; with one seed that may be chance."
    if chance is None:
        return f"{text}, {distance}."
    if chance > _LIKELY_CHANCE:
        return f"{text}, {distance}, which may be chance (p = {chance:.2g})."
    faster = _faster(board, best)
    return f"{text}, {distance} (p = {chance:.2g}){faster}."


def _faster(board: Board, best: Standing) -> str:
    baseline, target = board.baseline, board.target
    if baseline is None or target is None or baseline is best:
        return ""
    steps, needed = best.steps_to(target), baseline.steps_to(target)
    if steps is None or not needed:  # 0 steps: it never went below its first loss
        return ""
    return f"; it reaches {baseline.name}'s final loss after {steps / needed:.0%} of its steps"


def warnings(boards: Sequence[Board], *, together: bool) -> list[str]:
    """Caveats that a reader must know to judge the standings.

    Args:
        boards: the leaderboards.
        together: whether runs on a GPU trained at the same time.
    """
    remarks = []
    if together and boards:
        remarks.append(
            "runs that trained at the same time on a GPU waited for one another; compare steps, or train "
            "with --jobs 1 to compare seconds"
        )
    for board in boards:
        if board.unranked:
            remarks.append(
                f"batch {board.batch}: without {join(board.unranked)}, because runs of the search have not "
                "ended; run the same command again"
            )
        most = max((len(standing.losses) for standing in board.standings), default=0)
        for standing in board.standings:
            if len(standing.losses) < most:
                remarks.append(
                    f"batch {board.batch}: {standing.name} has {len(standing.losses)} of {most} seeds; run "
                    "the same command again"
                )
            if LR in standing.search.at_edge:
                remarks.append(
                    f"batch {board.batch}: the best learning rate of {standing.name} has no worse neighbour "
                    "on one side; use a larger --budget to continue the search"
                )
            if math.inf in standing.losses.values():
                lost = [str(seed) for seed, loss in standing.losses.items() if loss == math.inf]
                remarks.append(f"batch {board.batch}: {standing.name} diverged with seed {join(lost)}")
    return remarks


def standings_table(board: Board) -> Table:
    """One row for each contestant."""
    target = board.target
    needed = None if target is None or board.baseline is None else board.baseline.steps_to(target)
    rows = []
    for standing in board.standings:
        steps = None if target is None else standing.steps_to(target)
        seconds = None if target is None else standing.seconds_to(target)
        chance = board.chances.get(standing.name)
        rows.append(
            (
                standing.name,
                standing.spread.text(".3f") if standing.is_finite else "diverged",
                NOTHING if chance is None else f"{chance:.2g}",
                _steps(steps, needed),
                NOTHING if seconds is None else _seconds(seconds),
                _rise(standing.below),
                _rise(standing.above),
                NOTHING if standing.memory_gib is None else f"{standing.memory_gib:.2f}",
                _tuning(standing),
            )
        )
    goal = "the target" if target is None else f"{target:.3f}"
    head = (
        "Optimizer",
        "Validation loss",
        "p to the first",
        f"Steps to {goal}",
        f"Seconds to {goal}",
        "At half the rate",
        "At twice",
        "GiB",
        "Tuning runs",
    )
    return Table(head, tuple(rows))


def settings_table(board: Board) -> Table:
    """One row for each contestant: its best settings."""
    settings = {}
    for standing in board.standings:
        values = standing.task.settings(standing.search.best)
        settings[standing.name] = {short(field).replace("_", " "): value for field, value in values.items()}
    names = list(dict.fromkeys(name for values in settings.values() for name in values))
    rows = [
        (label, *(f"{values[name]:g}" if name in values else NOTHING for name in names))
        for label, values in settings.items()
    ]
    return Table(("Optimizer", *names), tuple(rows))


def _tuning(standing: Standing) -> str:
    ends = {"given up": standing.num_abandoned, "diverged": standing.num_diverged}
    return ", ".join([str(len(standing.search.tried)), *(f"{num} {end}" for end, num in ends.items() if num)])


def _steps(steps: float | None, needed: float | None) -> str:
    """Steps, and their share of those that the baseline needed."""
    if steps is None:
        return NOTHING
    return f"{steps:,.0f} ({steps / needed:.0%})" if needed else f"{steps:,.0f}"


def _seconds(seconds: float) -> str:
    """Whole seconds from ten on, two digits below.

    Example:
        >>> _seconds(0.1234), _seconds(1234.5)
        ('0.12', '1,234')
    """
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"


def _rise(value: float | None) -> str:
    return (
        NOTHING
        if value is None or math.isnan(value)
        else "far worse"
        if value == math.inf
        else f"{value:+.3f}"
    )
