"""Records as runs would leave them, with numbers from formulas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from merit_optim.lab.report.gather import MeasuredRun
from merit_optim.lab.reproduce.entry import Entry
from merit_optim.lab.reproduce.records import Record, Records
from merit_optim.lab.reproduce.scale import Scale, Trial

Row = dict[str, Any]
LAYERS = 3


def fake_record(trial: Trial, rows: list[Row], status: str = "finished") -> Record:
    """A record of a run that measured these rows."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    run = MeasuredRun("fake", trial.config.to_dict(), {}, status, by_kind)  # type: ignore[arg-type]
    return Record(trial, Path("fake"), run)


def fake_records(
    entry: Entry, scale: Scale, rows: Callable[[Trial], list[Row]], *, seeds: int = 3, diverged: str = ""
) -> Records:
    """A record for each trial of an entry; those of the series ``diverged`` did."""
    records = []
    for trial in entry.trials(scale, seeds):
        status = "diverged" if trial.series == diverged else "finished"
        records.append(fake_record(trial, rows(trial), status))
    return Records(tuple(records))


def losses(trial: Trial, final: float) -> list[Row]:
    """A validation loss on a straight line from 5 to ``final``, with a little of the seed in it."""
    steps = trial.config.steps or 0
    end = final + 0.01 * trial.config.seed
    return [
        {"kind": "validation", "step": step, "tokens": 0, "loss": 5 + (end - 5) * step / steps}
        for step in range(steps + 1)
    ]


def logits(trial: Trial, by_layer: list[float]) -> list[Row]:
    """Largest logits that end at these, by layer, with a little of the seed in them."""
    own = [value + 0.1 * trial.config.seed for value in by_layer]
    return [
        {"kind": "attention", "step": step, "max_logits": [[value * step] for value in own], "entropy": None}
        for step in (0, 1)
    ]
