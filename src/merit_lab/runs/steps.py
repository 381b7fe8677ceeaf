"""The frame of steps: what a run's lines measured, a row for each step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import polars as pl

from merit_lab.runs import metrics

LOGGED = ("training_loss", *metrics.LOGGED[1:])
"""The columns of the lines of training."""
_NUMBERS = (
    *(*LOGGED, "validation_loss", "loss_error", "max_logit", "entropy", "entropy_lowest"),
    *("clipped", "bounded", "relative_change"),
)
OF_PARAMETERS = ("clipped", "bounded", "smallest_ratio", "largest_ratio", "relative_change")
"""The numbers that a line of updates has for each parameter."""
_HEADS = pl.List(pl.List(pl.Float64))

COLUMNS: Mapping[str, Any] = {
    "run": pl.String,
    "step": pl.Int64,
    "tokens": pl.Int64,
    **dict.fromkeys(_NUMBERS, pl.Float64),
    "max_logits": _HEADS,  # for each layer, a number for each head
    "entropies": _HEADS,
    "updates": pl.List(pl.Struct({"parameter": pl.String, **dict.fromkeys(OF_PARAMETERS, pl.Float64)})),
    "events": pl.List(pl.Struct({"what": pl.String, "message": pl.String})),
}
"""The columns of the frame of steps."""


def rows(name: str, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run joined by their step, in the order of steps."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        row = found.setdefault(line["step"], {"run": name, "step": line["step"]})
        row.update(_measured(line, row))
    return [found[step] for step in sorted(found)]


def frame(rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    """The frame of these rows."""
    return pl.DataFrame(list(rows), schema=dict(COLUMNS))


def _measured(line: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    kind = line["kind"]
    if kind == "train":
        known = {key: value for key, value in line.items() if key in COLUMNS and value is not None}
        return {**known, "training_loss": line.get("loss")}
    if kind == "validation":
        tokens = line.get("tokens", row.get("tokens"))
        return {"validation_loss": line["loss"], "loss_error": line.get("loss_error"), "tokens": tokens}
    if kind == "attention":
        logits, entropies = line["max_logits"], line.get("entropy")
        values: dict[str, Any] = {"max_logits": logits, "max_logit": _largest(_flat(logits))}
        if entropies:
            heads = _flat(entropies)
            lowest = _largest([-one for one in heads])
            values |= {
                "entropies": entropies,
                "entropy": math.fsum(heads) / len(heads) if heads else None,
                "entropy_lowest": lowest if lowest is None else -lowest,
            }
        return values
    if kind == "update":
        parameters = line["parameters"]
        means: dict[str, Any] = {}
        for key in ("clipped", "bounded", "relative_change"):
            if numbers := [one[key] for one in parameters.values() if key in one]:
                means[key] = math.fsum(numbers) / len(numbers)
        return {**means, "updates": [{"parameter": name, **one} for name, one in parameters.items()]}
    if kind == "event":
        return {"events": [*row.get("events", ()), {"what": line["what"], "message": line.get("message")}]}
    return {}


def _flat(layers: list[list[float]]) -> list[float]:
    return [head for layer in layers for head in layer]


def _largest(values: list[float]) -> float | None:
    """The largest; NaN if there is one, which max may drop; None of none."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)
