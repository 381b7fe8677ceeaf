"""Results of evaluations, as files in the run directory.

    RUN/evaluate/step-00001000/lambada.json            the whole set
    RUN/evaluate/step-00001000/lambada-first-100.json  its first 100 items, in a separate file

Those of kept runs are beside their file, in evaluate/RUN instead of RUN/evaluate.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from merit_lab.runs import durable
from merit_lab.runs.run import Run, step_path

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number of a set, with its standard error over the set's items if lm-eval returns one."""

    value: float
    stderr: float | None
    higher_is_better: bool | None
    """None if lm-eval does not say."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The evaluation of one checkpoint on one set."""

    name: str
    step: int
    metrics: dict[str, Metric]
    num_items: int
    num_truncated: int
    """Prompts, each with one answer, whose beginning was truncated to fit into the model's context."""
    version: float | str
    """Version of lm-eval's task, which changes with its numbers."""
    inputs: dict[str, Any]
    """Everything that determines the numbers: with the same inputs they are not computed again."""
    environment: dict[str, Any]
    seconds: float

    @property
    def limit(self) -> int | None:
        """How many of the set's first items were evaluated; None for all."""
        limit: int | None = self.inputs["limit"]
        return limit

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        for metric in values["metrics"].values():
            for key in ("value", "stderr"):
                # JSON has no infinity, but a perplexity can be infinite.
                if metric[key] is not None and not math.isfinite(metric[key]):
                    metric[key] = str(metric[key])
        durable.write(path, json.dumps({"format": _FORMAT, **values}, indent=2, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.pop("format")
            if version != _FORMAT:
                raise ValueError(f"its format is {version!r}; this version reads format {_FORMAT}")
            metrics = {name: _metric(**metric) for name, metric in values.pop("metrics").items()}
            return cls(metrics=metrics, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a result of `merit evaluate` ({error}); remove it to evaluate again"
            ) from None


def result_path(run: Run, step: int, name: str, limit: int | None = None) -> Path:
    """Return the path of the result of a set."""
    suffix = "" if limit is None else f"-first-{limit}"
    return step_path(run.evaluations, step) / f"{name}{suffix}.json"


def read_results(run: Run, step: int, limit: int | None = None) -> dict[str, EvaluationResult]:
    """Return all results of a checkpoint on whole sets or, with a limit, on their first items."""
    folder = result_path(run, step, "any").parent
    results = [EvaluationResult.read(path) for path in sorted(folder.glob("*.json"))]
    return {result.name: result for result in results if result.limit == limit}


def last_results(run: Run) -> tuple[EvaluationResult, ...]:
    """Return all results of the last checkpoint that was evaluated."""
    paths = sorted(run.evaluations.glob("step-*/*.json"))
    return tuple(EvaluationResult.read(path) for path in paths if path.parent == paths[-1].parent)


def _metric(value: float | str, stderr: float | str | None, higher_is_better: bool | None) -> Metric:
    error = None if stderr is None else float(stderr)
    return Metric(value=float(value), stderr=error, higher_is_better=higher_is_better)
