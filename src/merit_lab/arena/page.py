"""The page of an arena: the standings, the losses and the tuning runs at every batch size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from merit_lab.arena import charts, summary
from merit_lab.arena.board import Board, Standing, boards, shared_a_gpu
from merit_lab.arena.runs import Runs
from merit_lab.arena.task import DECAY, WARMUP
from merit_lab.results import group, health
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.tables import settings
from merit_lab.runs.settings import show
from merit_lab.study.fields import LR
from merit_lab.study.page import JsonFile, Page, TableSection

if TYPE_CHECKING:
    from merit_lab.arena.plan import Arena

_CAPTION = (
    "Every contestant had the same number of tuning runs, with the first seed: first the learning rate by "
    "factors of two until the best had a worse neighbour on both sides, then the other settings with the "
    "remaining runs. Then its best settings were trained with every seed. Loss in nats per token, ± the "
    "standard deviation over seeds; p is from a paired t-test over seeds against the first. The target is "
    "the final loss of the best contestant without MERIT's ratios, and percentages are relative to its "
    "steps. The next two columns show how much half and twice the learning rate increase the loss."
)


_SETTINGS_CAPTION = "rest lr is the learning rate of embeddings, head and vectors, if it is separate."


def make_page(arena: Arena) -> Page:
    """Return the page of an arena, read from its run directories."""
    runs = Runs.read(arena.folder)
    leaderboards = boards(arena, runs)
    standings = [
        TableSection(
            f"Standings, batch {board.batch}",
            _CAPTION if board is leaderboards[0] else "",
            summary.standings_table(board),
        )
        for board in leaderboards
    ]
    return Page(
        title="Arena",
        facts=[
            "; ".join(contestant.text for contestant in arena.contestants),
            f"{arena.budget} tuning runs each",
            f"{len(runs.by_name)} runs",
        ],
        summary=summary.summarise(leaderboards),
        warnings=[
            *summary.warnings(leaderboards, together=shared_a_gpu(runs.by_name.values())),
            *health.warnings(
                {
                    f"{standing.name} (batch {board.batch})": list(standing.runs.values())
                    for board in leaderboards
                    for standing in board.standings
                }
            ),
        ],
        charts=[chart for board in leaderboards for chart in (charts.curves(board), *charts.tuning(board))],
        lead=standings,
        tables=[
            TableSection(
                f"Best settings, batch {board.batch}", _SETTINGS_CAPTION, summary.settings_table(board)
            )
            for board in leaderboards
        ],
        settings=settings(group(list(runs.by_name.values()))).common,
        printed=standings,
        rows=[_row(run) for run in runs.by_name.values()],
        record=JsonFile(
            "board.json",
            "the standings with full digits, and each best configuration",
            [
                {"batch": board.batch, "target": board.target, "standings": _standings(arena, board)}
                for board in leaderboards
            ],
        ),
    )


def _row(run: MeasuredRun) -> dict[str, Any]:
    losses = run.points("validation_loss")
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
    return [_standing(arena, standing, board) for standing in board.standings]


def _standing(arena: Arena, standing: Standing, board: Board) -> dict[str, Any]:
    target = board.target
    config = arena.trial(standing.task, standing.search.best, arena.seeds[0]).config
    return {
        "optimizer": standing.task.contestant.text,
        "setting": standing.task.settings(standing.search.best),
        "losses": {seed: _number(loss) for seed, loss in standing.losses.items()},
        "chance": board.chances.get(standing.name),
        "steps_to_target": None if target is None else standing.steps_to(target),
        "seconds_to_target": None if target is None else standing.seconds_to(target),
        "memory_gib": standing.memory_gib,
        "tuning": [
            {"setting": standing.task.settings(point), "loss": _number(loss)}
            for point, loss in standing.tuning.items()
        ],
        "at_edge": list(standing.search.at_edge),
        "config": {**config.to_dict(), "data": config.data.name},  # a board can be passed on: no paths
    }


def _number(loss: float | None) -> float | str | None:
    """For JSON, which has no infinity."""
    return "inf" if loss == math.inf else loss
