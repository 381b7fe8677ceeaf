"""What an arena found, in words and tables that follow from the numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.arena.board import Board, Standing
from merit_lab.report.summary import count_seeds, join
from merit_lab.report.tables import NOTHING, Table
from merit_lab.study.fields import LR, short

_LIKELY_CHANCE = 0.05


def summarise(boards: Sequence[Board]) -> str:
    """The answer in a sentence for each batch size."""
    return " ".join(map(_answer, boards)) or "No contestant is tuned yet."


def _answer(board: Board) -> str:
    best = board.best
    where = f"With a batch of {board.batch}"
    if not best.is_finite:
        return f"{where} no contestant has a setting at which all seeds finish."
    seeds = count_seeds(len(best.losses))
    text = f"{where} {best.name} ends lowest, at a validation loss of {best.mean:.3f} ({seeds})"
    others = [own for own in board.standings[1:] if own.is_finite]
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
    if steps is None or needed is None:
        return ""
    return f"; it is at {baseline.name}'s final loss after {steps / needed:.0%} of its steps"


def warnings(boards: Sequence[Board]) -> list[str]:
    """What a reader must know to judge the standings."""
    found = []
    for board in boards:
        for own in board.standings:
            if LR in own.search.at_edge:
                found.append(
                    f"batch {board.batch}: the best learning rate of {own.name} has no worse one on both "
                    "sides; a larger --budget would go on"
                )
            if math.inf in own.losses.values():
                lost = [str(seed) for seed, loss in own.losses.items() if loss == math.inf]
                found.append(f"batch {board.batch}: {own.name} diverged with seed {join(lost)}")
    return found


def standings_table(board: Board) -> Table:
    """One row for each contestant."""
    target = board.target
    needed = None if target is None or board.baseline is None else board.baseline.steps_to(target)
    rows = []
    for own in board.standings:
        steps = None if target is None else own.steps_to(target)
        seconds = None if target is None else own.seconds_to(target)
        chance = board.chances.get(own.name)
        spread = "" if own.deviation is None else f" ± {own.deviation:.3f}"
        rows.append(
            (
                own.name,
                f"{own.mean:.3f}{spread}" if own.is_finite else "diverged",
                NOTHING if chance is None else f"{chance:.2g}",
                NOTHING if steps is None or needed is None else f"{steps:,.0f} ({steps / needed:.0%})",
                NOTHING if seconds is None else f"{seconds:,.0f}",
                _rise(own.below),
                _rise(own.above),
                NOTHING if own.memory_gib is None else f"{own.memory_gib:.2f}",
                _tuning(own),
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
    """What was found best for each contestant."""
    found = {}
    for own in board.standings:
        values = own.contestant.settings(own.search.best)
        found[own.name] = {short(field).replace("_", " "): value for field, value in values.items()}
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    rows = [
        (own, *(f"{values[name]:g}" if name in values else NOTHING for name in names))
        for own, values in found.items()
    ]
    return Table(("Optimizer", *names), tuple(rows))


def _tuning(own: Standing) -> str:
    ends = {"given up": own.num_abandoned, "diverged": own.num_diverged}
    return ", ".join([str(len(own.search.tried)), *(f"{num} {end}" for end, num in ends.items() if num)])


def _rise(value: float | None) -> str:
    return (
        NOTHING
        if value is None or math.isnan(value)
        else "far worse"
        if value == math.inf
        else f"{value:+.3f}"
    )
