"""The rows of an entry's runs, with numbers from formulas in place of training."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from toy_scale import make_scale

from merit_lab.paper.artefact import Artefact, Verdict
from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Corpus, Planned, plan
from merit_lab.paper.records import Data, Records
from merit_lab.paper.scales import Scale
from merit_lab.runs import table
from merit_lab.tables import Table

CORPUS = Corpus(Path("data"), 256, "fake")
LAYERS = 3

Measure = Callable[[Planned], dict[str, Any]]
Steps = Callable[[Planned], list[dict[str, Any]]]


def fake(
    name: str,
    scale: Scale,
    measure: Measure = lambda _: {},
    steps: Steps = lambda _: [],
    *,
    status: Callable[[Planned], str | None] = lambda _: "finished",
    seeds: int = 3,
) -> Data:
    """What an entry's runs measured, and their steps; a run whose status is None is missing."""
    planned = plan(ENTRIES[name].runs, scale, seeds, CORPUS)
    runs, logged = [], []
    for one in planned:
        if (state := status(one)) is not None:
            about = {"identity": one.identity, "run": one.identity, "folder": "none", "status": state}
            runs.append({**about, **dict.fromkeys(table.OUTCOME), **measure(one)})
            logged += [{"run": one.identity, **row} for row in steps(one)]
    frame = pl.DataFrame(runs, infer_schema_length=None)
    return Records(Path("out"), frame, pl.DataFrame(logged, schema=dict(table.COLUMNS))).data(planned)


def verdicts(name: str, data: Data) -> tuple[Verdict, ...]:
    """On each claim of an entry."""
    return Artefact(ENTRIES[name], make_scale(), data).verdicts


def outcomes(name: str, data: Data) -> list[str]:
    """The outcome of each claim of an entry."""
    return [one.outcome for one in verdicts(name, data)]


def table_of(name: str, data: Data) -> Table:
    """The table of an entry."""
    return Artefact(ENTRIES[name], make_scale(), data).table()


def noise(planned: Planned) -> float:
    """A little that differs by seed and series, so that differences have a spread."""
    seed = planned.config.seed
    return 0.01 * seed + 0.001 * random.Random(f"{planned.series} {seed}").random()


def loss(values: dict[str, float], otherwise: float = 3.4) -> Measure:
    """The final loss of each series."""
    return lambda one: {"validation_loss": values.get(one.series, otherwise) + noise(one)}


def line(final: Callable[[Planned], float]) -> Steps:
    """Validation losses on a straight line from 5."""

    def rows(one: Planned) -> list[dict[str, Any]]:
        steps = one.config.steps or 0
        end = final(one) + noise(one)
        return [{"step": step, "validation_loss": 5 + (end - 5) * step / steps} for step in range(steps + 1)]

    return rows


def logits(by_layer: Callable[[Planned], list[float]]) -> Steps:
    """Largest logits that end at these values, by layer."""
    return lambda one: [
        {"step": step, "max_logits": [[value * step * (1 + noise(one))] for value in by_layer(one)]}
        for step in (0, 1)
    ]


def updates(kind: str, steps: Callable[[Planned], list[list[float]]]) -> Steps:
    """Statistics of updates: at each step a number for each layer's matrix; those of vectors are 1."""
    return lambda one: [
        {
            "step": step,
            "updates": [
                {"parameter": f"blocks.{layer}.{part}.weight", kind: value if part == "mlp.up" else 1.0}
                for layer, value in enumerate(layers)
                for part in ("mlp.up", "mlp_norm")
            ],
        }
        for step, layers in enumerate(steps(one), start=1)
    ]
