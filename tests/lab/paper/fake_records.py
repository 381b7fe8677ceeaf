"""Records as runs would write them, with numbers from formulas."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.paper.entry import PaperEntry
from merit_lab.paper.records import Records, TrialRecord
from merit_lab.paper.setups import EntryTrial, Scale
from merit_lab.results.gather import MeasuredRun
from merit_lab.runs import Measurements, Run, step_path

Row = dict[str, Any]
LAYERS = 3


def fake_record(trial: EntryTrial, rows: list[Row], status: str = "finished") -> TrialRecord:
    """The record of a run that measured these rows."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    run = MeasuredRun("fake", trial.config.to_dict(), {}, status, by_kind)  # type: ignore[arg-type]
    return TrialRecord(trial, Path("fake"), run)


def fake_records(
    entry: PaperEntry,
    scale: Scale,
    rows: Callable[[EntryTrial], list[Row]],
    *,
    seeds: int = 3,
    diverged: str = "",
) -> Records:
    """A record for each trial of an entry; those of series ``diverged`` diverged."""
    records = []
    for trial in entry.trials(scale, seeds):
        status = "diverged" if trial.series == diverged else "finished"
        records.append(fake_record(trial, rows(trial), status))
    return Records(tuple(records))


def losses(trial: EntryTrial, final: float) -> list[Row]:
    """A validation loss on a straight line from 5 to ``final``.

    The seed shifts it a little, and seed and optimizer together less, so margins have a spread.
    """
    steps, seed = trial.config.steps or 0, trial.config.seed
    end = final + 0.01 * seed + 0.001 * random.Random(f"{trial.series} {seed}").random()
    return [
        {"kind": "validation", "step": step, "tokens": 0, "loss": 5 + (end - 5) * step / steps}
        for step in range(steps + 1)
    ]


def logits(trial: EntryTrial, by_layer: list[float]) -> list[Row]:
    """Largest logits that end at these values, by layer, shifted a little by the seed."""
    values = [value + 0.1 * trial.config.seed for value in by_layer]
    return [
        {
            "kind": "attention",
            "step": step,
            "max_logits": [[value * step] for value in values],
            "entropy": None,
        }
        for step in (0, 1)
    ]


def evaluated(
    entry: PaperEntry, scale: Scale, folder: Path, value: Callable[[EntryTrial], float], *, seeds: int = 7
) -> Records:
    """Records of runs with evaluation results in their directories.

    MERIT wins or loses the same number of tasks with every seed, so the sign test needs several seeds.
    """
    records = []
    for place, trial in enumerate(entry.trials(scale, seeds)):
        run = Run.create(folder / str(place), trial.config.to_dict(), {})
        for one in PAPER_SETS[entry.name]:
            number = value(trial) + 0.0001 * trial.config.seed**2
            metrics = dict.fromkeys(("acc", "perplexity", "word_perplexity"), number)
            path = step_path(run.folder / "evaluate", trial.config.steps or 0).with_suffix(".json")
            limit = scale.evaluation_limit
            Measurements(path).put(one if limit is None else f"{one}-first-{limit}", {}, metrics)
        records.append(replace(fake_record(trial, []), folder=run.folder))
    return Records(tuple(records))
