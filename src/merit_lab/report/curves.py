"""What was measured in a run, as curves: (step, value) points under a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from merit_lab.record import keep_nan

Rows = dict[str, list[dict[str, Any]]]  # the lines of metrics.jsonl, by kind
Point = tuple[int, float]
Curves = dict[str, list[Point]]

MAX_LOGIT = "max_logit"  # over all layers and heads; that of one layer alone has layer_name's name
_TRAINING = {
    "training_loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_second": "tokens_per_second",
    "optimizer_share": "optimizer_share",
}
_UPDATE = ("clipped", "bounded", "relative_change")


def layer_name(layer: int) -> str:
    """The name of the curve of a layer's largest attention logit; layers count from 1."""
    return f"{MAX_LOGIT}_layer_{layer}"


def read_curves(rows: Rows) -> Curves:
    """Every curve that has at least one point."""
    curves: Curves = {}

    def add(name: str, step: int, value: float | None) -> None:
        if value is not None:
            curves.setdefault(name, []).append((step, float(value)))

    for row in rows.get("validation", []):
        add("validation_loss", row["step"], row["loss"])
    for row in rows.get("train", []):
        for name, key in _TRAINING.items():
            add(name, row["step"], row.get(key))
    for row in rows.get("attention", []):
        layers = [keep_nan(max, heads) for heads in row["max_logits"]]
        add(MAX_LOGIT, row["step"], keep_nan(max, layers))
        for layer, largest in enumerate(layers, start=1):
            add(layer_name(layer), row["step"], largest)
        if row.get("entropy") is not None:
            heads = [entropy for layer in row["entropy"] for entropy in layer]
            add("entropy_mean", row["step"], _mean(heads))
            add("entropy_lowest", row["step"], keep_nan(min, heads))
    for row in rows.get("update", []):
        for name in _UPDATE:
            add(name, row["step"], _mean([own[name] for own in row["parameters"].values()]))
    return curves


def last_validation_loss(rows: Rows) -> float | None:
    """The loss of the last validation, finite or not; None where there was none."""
    validations = rows.get("validation", [])
    return float(validations[-1]["loss"]) if validations else None


def tokens_per_step(rows: Rows) -> float:
    """Tokens of one step; NaN where none were recorded."""
    records = [*rows.get("train", []), *rows.get("validation", [])]
    return next((row["tokens"] / row["step"] for row in records if row["step"] > 0), math.nan)


def finite(points: Iterable[Point]) -> list[Point]:
    """The points that can be drawn."""
    return [point for point in points if math.isfinite(point[1])]


def thin(
    curves: Sequence[Sequence[Point]], limit: int, combine: Callable[[list[float]], float]
) -> list[list[Point]]:
    """The curves with about ``limit`` points at most, neighbours combined into one.

    All curves are cut at the same steps, so that curves of one length keep their steps in common.
    A combined point stands at the last of its steps.
    """
    if max((len(points) for points in curves), default=0) <= limit:
        return [list(points) for points in curves]
    width = math.ceil(max(points[-1][0] for points in curves if points) / limit)
    thinned = []
    for points in curves:
        bins: dict[int, list[Point]] = {}
        for point in points:
            bins.setdefault(-(-point[0] // width), []).append(point)
        thinned.append([(own[-1][0], combine([value for _, value in own])) for own in bins.values()])
    return thinned


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over ``curves``, at the steps that all of them have.

    Where one of them ends early, because its run diverged or goes on, the mean ends too: a mean over
    the remaining runs would look better than the series is.
    """
    tables = [dict(points) for points in curves if points]
    if not tables:
        return []
    common = [step for step in tables[0] if all(step in table for table in tables)]
    return [(step, _mean([table[step] for table in tables])) for step in sorted(common)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
