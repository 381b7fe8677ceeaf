"""The measurements of a run as named curves of (step, value) points."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from merit_lab.runs import keep_nan

Line = dict[str, Any]  # of metrics.jsonl
Rows = dict[str, list[Line]]  # lines by kind
Point = tuple[int, float]
Curves = dict[str, list[Point]]

MOST_POINTS = 5_000  # in a curve thinned while reading: twenty times as many as are drawn
MAX_LOGIT = "max_logit"  # over all layers and heads; see layer_name for single layers
_TRAINING = {
    "training_loss": "loss",
    "grad_norm": "grad_norm",
    "weight_norm": "weight_norm",
    "lr": "lr",
    "tokens_per_second": "tokens_per_second",
    "optimizer_share": "optimizer_share",
}
_UPDATE = ("clipped", "bounded", "relative_change")


def layer_name(layer: int) -> str:
    """The name of the curve of a layer's largest attention logit; layers count from 1."""
    return f"{MAX_LOGIT}_layer_{layer}"


def combination(name: str) -> Callable[[Sequence[float]], float]:
    """How a curve's neighbouring values are combined when it is thinned; by default, their mean."""
    if name.startswith(MAX_LOGIT):
        return max
    if name == "entropy_lowest":
        return min
    if name == "tokens_per_second":
        return statistics.median  # steps with measurements or checkpoints are slow, most are not
    return statistics.fmean


def read_curves(rows: Rows) -> Curves:
    """Every curve that has at least one point."""
    curves: Curves = {}
    for kind, lines in rows.items():
        for line in lines:
            for name, value in _values(kind, line):
                curves.setdefault(name, []).append((line["step"], float(value)))
    return curves


@dataclass(frozen=True)
class ThinnedCurves:
    """Curves with at most about MOST_POINTS points, and the number of steps that each point covers.

    A longer curve has its finite neighbours combined; its last point is kept as measured.
    """

    curves: Curves
    steps: dict[str, int]


@dataclass
class CurveReader:
    """Read the lines of a run one by one and return its thinned curves."""

    _columns: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """Add the next line."""
        step = line["step"]
        for name, value in _values(line["kind"], line):
            steps, values = self._columns.get(name) or self._begin(name)
            steps.append(step)
            values.append(value)

    def _begin(self, name: str) -> tuple[array[int], array[float]]:
        return self._columns.setdefault(name, (array("q"), array("d")))

    def curves(self) -> ThinnedCurves:
        """The curves of the lines added so far."""
        thinned = ThinnedCurves({}, {})
        for name, (steps, values) in self._columns.items():
            width = thinning_width(steps[-1]) if len(steps) > MOST_POINTS else 1
            points = zip(steps, values, strict=True) if width == 1 else _combined(name, steps, values, width)
            thinned.curves[name] = list(points)
            thinned.steps[name] = width
        return thinned


def thinning_width(last_step: int) -> int:
    """The number of steps that each point of a curve covers if it was thinned while reading.

    A power of two, so the points of a long run end at steps where those of a shorter run end too.
    """
    return 1 << (math.ceil(last_step / MOST_POINTS) - 1).bit_length()


def _combined(name: str, steps: array[int], values: array[float], width: int) -> Iterator[Point]:
    import numpy as np

    every_step, every_value = np.array(steps[:-1]), np.array(values[:-1])
    drawable = np.isfinite(every_value)
    every_step, every_value = every_step[drawable], every_value[drawable]
    ends = np.flatnonzero(np.diff(-(-every_step // width))) + 1
    combine = combination(name)
    for begin, end in pairwise([0, *ends.tolist(), len(every_step)]):
        if end > begin:
            yield int(every_step[end - 1]), combine(every_value[begin:end].tolist())
    yield steps[-1], values[-1]


def _values(kind: str, line: Line) -> Iterator[tuple[str, float]]:
    """The values in a line, with the names of their curves."""
    if kind == "train":
        for name, key in _TRAINING.items():
            value = line.get(key)
            if value is not None:
                yield name, value
    elif kind == "validation":
        yield "validation_loss", line["loss"]
    elif kind == "attention":
        layers = [keep_nan(max, heads) for heads in line["max_logits"]]
        yield MAX_LOGIT, keep_nan(max, layers)
        for layer, largest in enumerate(layers, start=1):
            yield layer_name(layer), largest
        if line.get("entropy") is not None:
            heads = [entropy for layer in line["entropy"] for entropy in layer]
            yield "entropy_mean", _mean(heads)
            yield "entropy_lowest", keep_nan(min, heads)
    elif kind == "update":
        for name in _UPDATE:
            yield name, _mean([parameter[name] for parameter in line["parameters"].values()])


def last_validation_loss(rows: Rows) -> float | None:
    """The last validation loss, finite or not; None if there is none."""
    validations = rows.get("validation", [])
    return float(validations[-1]["loss"]) if validations else None


def tokens_per_step(rows: Rows) -> float:
    """Tokens per step; NaN if none were recorded."""
    records = [*rows.get("train", []), *rows.get("validation", [])]
    return next((row["tokens"] / row["step"] for row in records if row["step"] > 0), math.nan)


def finite(points: Iterable[Point]) -> list[Point]:
    """The points with finite values."""
    return [point for point in points if math.isfinite(point[1])]


def thin(
    curves: Sequence[Sequence[Point]], limit: int, combine: Callable[[list[float]], float]
) -> list[list[Point]]:
    """The curves with at most about ``limit`` points each, neighbours combined into one.

    All curves are cut at the same steps, so curves of equal length keep their steps in common. A combined
    point is at the last of its steps.
    """
    if max((len(points) for points in curves), default=0) <= limit:
        return [list(points) for points in curves]
    last_step = max(points[-1][0] for points in curves if points)
    read = thinning_width(last_step)  # no point of any curve covers more steps
    width = read * math.ceil(last_step / (limit * read))
    thinned = []
    for points in curves:
        bins: dict[int, list[Point]] = {}
        for point in points:
            bins.setdefault(-(-point[0] // width), []).append(point)
        thinned.append([(group[-1][0], combine([value for _, value in group])) for group in bins.values()])
    return thinned


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over ``curves``, at the steps that all of them have.

    If one of them ends early, because its run diverged or is still running, the mean ends there too: a mean
    over the remaining runs would look better than the series is.
    """
    tables = [dict(points) for points in curves if points]
    if not tables:
        return []
    common = [step for step in tables[0] if all(step in table for table in tables)]
    return [(step, _mean([table[step] for table in tables])) for step in sorted(common)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
