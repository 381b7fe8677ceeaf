"""The rows of an entry's runs, with numbers from formulas in place of training."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.paper.entries import ENTRIES
from merit_lab.paper.plan import Corpus, Data, Found, Planned, identify, plan
from merit_lab.paper.scales import Scale
from merit_lab.runs import table

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
    planned = plan(ENTRIES[name].runs, scale, seeds)
    trials = Found(pl.DataFrame(schema={"identity": pl.String}), {}).trials(planned, Path("out"), CORPUS)
    runs, by_run = [], {}
    for one, trial in zip(planned, trials, strict=True):
        if (state := status(one)) is not None:
            outcome = {**dict.fromkeys(table.OUTCOME), "status": state, **measure(one)}
            about = {"identity": identify(trial.config, CORPUS), "run": trial.folder.name, "folder": "none"}
            runs.append({**about, **outcome})
            if rows := steps(one):
                by_run[trial.folder.name] = pl.DataFrame(rows, infer_schema_length=None)
    schema = {"identity": pl.String, "run": pl.String, "folder": pl.String}
    frame = pl.DataFrame(runs, infer_schema_length=None) if runs else pl.DataFrame(schema=schema)
    return Found(frame, by_run).data(planned, trials, CORPUS)


def outcomes(name: str, data: Data) -> list[str]:
    """The outcome of each claim of an entry."""
    return [claim.verdict(data).outcome for claim in ENTRIES[name].claims]


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
