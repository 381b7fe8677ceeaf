"""The frame of steps: what a run's lines measured, a row for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import polars as pl

from merit_lab.runs import metrics

LOGGED = ("training_loss", *metrics.LOGGED[1:])
"""The columns of the lines of training."""
_MEANS = ("clipped", "bounded", "relative_change")  # over the parameters
_NUMBERS = (*LOGGED, "validation_loss", "loss_error", "max_logit", "entropy", "entropy_lowest", *_MEANS)
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
    match line["kind"]:
        case "train":
            known = {key: value for key, value in line.items() if key in COLUMNS and value is not None}
            return {**known, "training_loss": line.get("loss")}
        case "validation":
            tokens = line.get("tokens", row.get("tokens"))
            return {"validation_loss": line["loss"], "loss_error": line.get("loss_error"), "tokens": tokens}
        case "attention":
            values = {"max_logits": line["max_logits"], "max_logit": _of_heads(line["max_logits"], np.max)}
            if entropies := line.get("entropy"):
                mean, lowest = (_of_heads(entropies, choose) for choose in (np.mean, np.min))
                values |= {"entropies": entropies, "entropy": mean, "entropy_lowest": lowest}
            return values
        case "update":
            parts = line["parameters"]
            known = {key: [one[key] for one in parts.values() if key in one] for key in _MEANS}
            means = {key: float(np.mean(numbers)) for key, numbers in known.items() if numbers}
            return {**means, "updates": [{"parameter": name, **one} for name, one in parts.items()]}
        case _:
            event = {"what": line["what"], "message": line.get("message")}
            return {"events": [*row.get("events", ()), event]}


def _of_heads(layers: list[list[float]], combine: Callable[[list[float]], Any]) -> float | None:
    """The numbers of all heads combined; numpy keeps a NaN, which Python's max and min may drop."""
    heads = [head for layer in layers for head in layer]
    return float(combine(heads)) if heads else None
