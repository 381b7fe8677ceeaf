"""All runs as two frames: a row a run, and a row a logged step. Whatever is asked after training asks these.

    runs    run, folder, status; every setting by its dotted name ("optimizer.lr", "model.width"); the options
            of the optimizer one by one ("optimizer.options.rest_lr"); the environment
            ("environment.data.fingerprint"); how it ended: OUTCOME; and what was measured at its last
            measured checkpoint ("evaluate.lambada.perplexity", "curvature.trace", "noise.scale")
    steps   run, step and what was measured there: COLUMNS; null where it was not, NaN where it was NaN

A setting that some runs lack is null in their rows; an option that was given as null is the text "null".
A column of settings has numbers where all its values are numbers, and text otherwise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from merit_lab.runs.find import nested_run_folders
from merit_lab.runs.measurements import columns
from merit_lab.runs.run import Run
from merit_lab.runs.settings import flatten

_NUMBERS = (
    *("training_loss", "validation_loss", "loss_error", "lr", "grad_norm", "weight_norm", "seconds"),
    *("tokens_per_second", "optimizer_share", "mfu", "memory_gib", "max_logit", "entropy", "entropy_lowest"),
    *("clipped", "bounded", "relative_change"),
)
_OF_PARAMETERS = ("clipped", "bounded", "smallest_ratio", "largest_ratio", "relative_change")
_HEADS = pl.List(pl.List(pl.Float64))

COLUMNS: Mapping[str, Any] = {
    "run": pl.String,
    "step": pl.Int64,
    "tokens": pl.Int64,
    **dict.fromkeys(_NUMBERS, pl.Float64),
    "max_logits": _HEADS,  # for each layer, a number for each head
    "entropies": _HEADS,
    "updates": pl.List(pl.Struct({"parameter": pl.String, **dict.fromkeys(_OF_PARAMETERS, pl.Float64)})),
    "events": pl.List(pl.Struct({"what": pl.String, "message": pl.String})),
}
"""The columns of the frame of steps."""

OUTCOME: Mapping[str, Any] = {
    "last_step": pl.Int64,
    "tokens": pl.Int64,
    "seconds": pl.Float64,
    "validation_loss": pl.Float64,  # the last
    "loss_error": pl.Float64,  # its standard error over the sequences
    "bits_per_byte": pl.Float64,  # the same in a unit that tokenizers share
    "training_loss": pl.Float64,  # the last
    "max_logit": pl.Float64,  # the last
    "largest_logit": pl.Float64,  # at any time
    "tokens_per_second": pl.Float64,  # the median
    "message": pl.String,  # of the event that ended it
}
"""The columns of the frame of runs that say how a run ended."""


class Table(NamedTuple):
    """All runs: a row a run, and a row a logged step."""

    runs: pl.DataFrame
    steps: pl.DataFrame


def read(*folders: Path | str) -> Table:
    """Read the runs in folders, at any depth: run directories, running or not, and archives.

    Raises ValueError if there are none. Two runs of one name are told apart by the folder they are in.
    """
    found = dict.fromkeys(path for folder in folders for path in nested_run_folders(Path(folder)))
    if not found:
        raise ValueError(
            f"no runs in {', '.join(map(str, folders))}; give run directories, the folder of a study, or a "
            "runs.parquet"
        )
    return of([Run.open(path) for path in found])


def of(runs: Iterable[Run]) -> Table:
    """The table of these runs."""
    runs = list(runs)
    names = _names(runs)
    measured = {name: _steps(run, name) for name, run in zip(names, runs, strict=True)}
    steps = pl.DataFrame([row for rows in measured.values() for row in rows], schema=dict(COLUMNS))
    rows = [_row(name, run, measured[name]) for name, run in zip(names, runs, strict=True)]
    return Table(_frame(rows), steps)


def _names(runs: list[Run]) -> list[str]:
    """The runs' names; with their folders', where one name is that of several runs."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(run.folder) for name, run in zip(names, runs, strict=True)
    ]


def _row(name: str, run: Run, steps: list[dict[str, Any]]) -> dict[str, Any]:
    settings = flatten({key: value for key, value in run.config.items() if key != "tokens"})
    options = settings.pop("optimizer.options", ())
    for option in options if isinstance(options, tuple) else ():
        key, _, value = str(option).partition("=")
        settings[f"optimizer.options.{key}"] = _read(value)
    environment = {f"environment.{key}": value for key, value in flatten(run.environment).items()}
    measured = columns(run.folder)
    return {
        "run": name,
        "folder": str(run.folder),
        **settings,
        **environment,
        **_outcome(run, steps),
        **measured,
    }


def _read(value: str) -> object:
    try:
        return value if value == "null" else json.loads(value)
    except ValueError:
        return value


def _outcome(run: Run, steps: list[dict[str, Any]]) -> dict[str, Any]:
    def values(column: str) -> list[float]:
        return [row[column] for row in steps if row.get(column) is not None]

    def last(column: str) -> Any:
        return next(reversed(values(column)), None)

    status, loss = run.status, last("validation_loss")
    per_token = run.environment.get("data", {}).get("bytes_per_token")
    events = [event for row in steps for event in row.get("events", ()) if event["what"] == status]
    logits, speeds = values("max_logit"), pl.Series(values("tokens_per_second"), dtype=pl.Float64)
    return {
        "status": status,
        "last_step": max((row["step"] for row in steps), default=0),
        "tokens": last("tokens"),
        "seconds": last("seconds"),
        "validation_loss": loss,
        "loss_error": last("loss_error"),
        "bits_per_byte": loss / math.log(2) / per_token if loss is not None and per_token else None,
        "training_loss": last("training_loss"),
        "max_logit": last("max_logit"),
        "largest_logit": _largest(logits) if logits else None,
        "tokens_per_second": speeds.median(),
        "message": events[-1]["message"] if events else "",
    }


def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    columns: dict[str, pl.Series] = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(name) for row in rows]
        if name in OUTCOME:
            columns[name] = pl.Series(name, values, dtype=OUTCOME[name])
            continue
        known = [value for value in values if value is not None]
        for kind, types in ((pl.Boolean, bool), (pl.Int64, int), (pl.Float64, int | float)):
            if all(isinstance(one, types) and (kind == pl.Boolean or type(one) is not bool) for one in known):
                columns[name] = pl.Series(name, values, dtype=kind if known else pl.String, strict=False)
                break
        else:
            columns[name] = pl.Series(name, [_text(value) for value in values], dtype=pl.String)
    return pl.DataFrame(columns)


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _steps(run: Run, name: str) -> list[dict[str, Any]]:
    """The lines of a run joined by their step."""
    rows: dict[int, dict[str, Any]] = {}
    for line in run.lines():
        row = rows.setdefault(line["step"], {"run": name, "step": line["step"]})
        row.update(_measured(line, row))
    return [rows[step] for step in sorted(rows)]


def _measured(line: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    kind = line["kind"]
    if kind == "train":
        known = {key: value for key, value in line.items() if key in COLUMNS and value is not None}
        return {**known, "training_loss": line.get("loss")}
    if kind == "validation":
        return {
            "validation_loss": line["loss"],
            "loss_error": line.get("loss_error"),
            "tokens": line.get("tokens", row.get("tokens")),
        }
    if kind == "attention":
        logits, entropies = line["max_logits"], line.get("entropy")
        values: dict[str, Any] = {"max_logits": logits, "max_logit": _largest(_flat(logits))}
        if entropies is not None:
            heads = _flat(entropies)
            lowest = -_largest([-one for one in heads])
            values |= {
                "entropies": entropies,
                "entropy": math.fsum(heads) / len(heads),
                "entropy_lowest": lowest,
            }
        return values
    if kind == "update":
        parameters = line["parameters"]
        means = {
            key: math.fsum(one[key] for one in parameters.values()) / len(parameters)
            for key in ("clipped", "bounded", "relative_change")
            if parameters
        }
        return {**means, "updates": [{"parameter": name, **one} for name, one in parameters.items()]}
    if kind == "event":
        return {"events": [*row.get("events", ()), {"what": line["what"], "message": line.get("message")}]}
    return {}


def _flat(layers: list[list[float]]) -> list[float]:
    return [head for layer in layers for head in layer]


def _largest(values: list[float]) -> float:
    """The largest, or NaN if there is one, which max may drop."""
    return math.nan if any(map(math.isnan, values)) else max(values)
