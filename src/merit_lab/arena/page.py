"""An arena's page: the standings, the losses and the tuning of every batch size."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from merit_lab.arena import charts, summary
from merit_lab.arena.board import Board, Standing, boards
from merit_lab.arena.plan import DECAY, WARMUP, Arena, Runs
from merit_lab.report.curves import finite
from merit_lab.report.gather import MeasuredRun, differing, flatten, show
from merit_lab.study.fields import LR
from merit_lab.study.page import JsonFile, Page, TableSection

_CAPTION = (
    "Every contestant had the same number of tuning runs, with the first seed: first the learning rate by "
    "factors of two until the best had a worse one on both sides, then the other settings with what was "
    "left. Then its best setting was trained with every seed. Loss in nats per token, ± the standard "
    "deviation over seeds; p is of a paired t-test over seeds against the first. The target is the loss that "
    "the best contestant without MERIT's ratios ends with, and shares are of its steps. The next two columns "
    "are what half and twice the learning rate cost."
)


_OF_SETTINGS = "rest lr is the learning rate of embeddings, head and vectors, where it is another."


def make_page(arena: Arena) -> Page:
    """The page of an arena, from its run directories."""
    runs = Runs.read(arena)
    found = boards(arena, runs)
    standings = [
        TableSection(
            f"Standings, batch {board.batch}",
            _CAPTION if board is found[0] else "",
            summary.standings_table(board),
        )
        for board in found
    ]
    return Page(
        title="Arena",
        facts=[
            "; ".join(own.text for own in arena.entries),
            f"{arena.budget} tuning runs each",
            f"{len(runs.by_name)} runs",
        ],
        summary=summary.summarise(found),
        warnings=summary.warnings(found),
        charts=[
            chart for board in found for chart in (charts.curves(board), charts.tuning(arena, runs, board))
        ],
        lead=standings,
        tables=[
            TableSection(f"Best settings, batch {board.batch}", _OF_SETTINGS, summary.settings_table(board))
            for board in found
        ],
        settings=[(name, show(value)) for name, value in _shared(arena).items()],
        printed=standings,
        rows=[_row(run) for run in runs.by_name.values()],
        record=JsonFile(
            "board.json",
            "the standings with full digits, and each best configuration",
            [
                {"batch": board.batch, "target": board.target, "standings": _standings(arena, board)}
                for board in found
            ],
        ),
    )


def _shared(arena: Arena) -> dict[str, object]:
    """The settings that all runs have in common."""
    tuned = {axis.field for own in arena.contestants for axis in own.axes}
    chosen = [flatten({"optimizer": asdict(own.optimizer)}) for own in arena.contestants]
    left_out = {*tuned, *differing(chosen), "optimizer.name", "seed", "batch", "steps", "data"}
    return {name: value for name, value in flatten(arena.base.to_dict()).items() if name not in left_out}


def _row(run: MeasuredRun) -> dict[str, Any]:
    losses = finite(run.curves.get("validation_loss", []))
    return {
        "optimizer": run.settings["optimizer.name"],
        "batch": run.settings["batch"],
        **{axis: show(run.settings[axis]) for axis in (LR, WARMUP, DECAY)},
        "options": " ".join(run.config["optimizer"]["options"]),
        "seed": run.seed,
        "status": run.status,
        "validation_loss": losses[-1][1] if losses else None,
        "run": run.name,
    }


def _standings(arena: Arena, board: Board) -> list[dict[str, Any]]:
    return [_standing(arena, own, board) for own in board.standings]


def _standing(arena: Arena, own: Standing, board: Board) -> dict[str, Any]:
    target = board.target
    return {
        "optimizer": own.contestant.entry.text,
        "setting": own.contestant.settings(own.search.best),
        "losses": {seed: _number(loss) for seed, loss in own.losses.items()},
        "chance": board.chances.get(own.name),
        "steps_to_target": None if target is None else own.steps_to(target),
        "seconds_to_target": None if target is None else own.seconds_to(target),
        "memory_gib": own.memory_gib,
        "tuning": [
            {"setting": own.contestant.settings(point), "loss": _number(loss)}
            for point, loss in own.tuning.items()
        ],
        "at_edge": list(own.search.at_edge),
        "config": arena.trial(own.contestant, own.search.best, arena.seeds[0]).config.to_dict(),
    }


def _number(loss: float | None) -> float | str | None:
    """As JSON has it, which knows no infinity."""
    return "inf" if loss == math.inf else loss
