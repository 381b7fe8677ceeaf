"""All runs as two frames: a row a run, and a row a logged step. Whatever is asked after training asks these.

    runs    run, folder, status; every setting by its dotted name ("optimizer.lr", "model.width"); the options
            of the optimizer one by one ("optimizer.options.momentum"); the environment
            ("environment.data.fingerprint"); what was measured at its last measured checkpoint
            ("evaluate.lambada.perplexity", "curvature.trace"; see measurements.py); and how it ended: OUTCOME
    steps   run, step and what was measured there: COLUMNS; null where it was not, NaN where it was NaN

A setting that some runs lack is null in their rows; an option that was given as null is the text "null".
A column of settings has numbers where all its values are numbers, and text otherwise.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from merit_lab.json_values import decode, encode
from merit_lab.runs import archive, find, measurements, steps
from merit_lab.runs.archive import Head
from merit_lab.runs.lock import is_locked
from merit_lab.runs.metrics import read_metrics
from merit_lab.runs.run import Run, outcome_of
from merit_lab.runs.settings import flatten
from merit_lab.runs.steps import COLUMNS

__all__ = ["COLUMNS", "OUTCOME", "Table", "flat", "read", "sources"]

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


Source = tuple[list[Head], pl.DataFrame]
"""Runs, and the frame of their steps."""


class Table(NamedTuple):
    """All runs: a row a run, and a row a logged step."""

    runs: pl.DataFrame
    steps: pl.DataFrame


def read(*folders: Path | str) -> Table:
    """Read the runs in folders, at any depth: run directories, running or not, and files of kept runs.

    Raises ValueError if there are none. Two runs of one name are told apart by the folder they are in; a run
    that has both its directory and a row in the file beside it is read from its directory.
    """
    return _table(*_together(sources(folders)))


def sources(folders: Iterable[Path | str]) -> list[Source]:
    """The runs in folders, from each directory and from each file of kept runs; none is there twice."""
    paths = [Path(folder) for folder in folders]
    found: dict[Path, Source] = {}
    for place in (place for path in paths for place in find.places(path)):
        for folder in place.directories:
            if folder.resolve() not in found:
                found[folder.resolve()] = _live(Run.open(folder))
        if place.archive is not None and place.archive.resolve() not in found:
            heads, measured = archive.read(place.archive)
            names = [folder.resolve().name for folder in place.directories]
            left = [head for head in heads if head.name not in names]
            found[place.archive.resolve()] = left, measured.filter(~pl.col("run").is_in(names))
    if not any(heads for heads, _ in found.values()):
        raise ValueError(
            f"no runs in {', '.join(map(str, paths))}; give run directories, the folder of a study, or a "
            "runs.parquet"
        )
    return list(found.values())


def flat(frame: pl.DataFrame) -> pl.DataFrame:
    """A frame with lists as JSON text, which a CSV file can hold."""
    nested = [name for name, kind in frame.schema.items() if kind.is_nested()]
    return frame.with_columns(
        pl.Series(name, [None if one is None else encode(one) for one in frame[name].to_list()], pl.String)
        for name in nested
    )


def _live(run: Run) -> Source:
    running = is_locked(run.folder)  # before its lines are read: a run that ends meanwhile has them all
    rows = steps.rows(run.name, read_metrics(run.metrics_path))
    events = [event for row in rows for event in row.get("events", ())]
    status = "running" if running else outcome_of(events) or "unfinished"
    measured = measurements.columns(run.folder)
    head = Head(run.name, str(run.folder), status, run.config, run.environment, measured)
    return [head], steps.frame(rows)


def _together(sources: list[Source]) -> Source:
    """All runs; those of one name by their folders."""
    times = Counter(head.name for heads, _ in sources for head in heads)
    all_heads, frames = [], []
    for heads, frame in sources:
        folders = {head.name: head.folder for head in heads if times[head.name] > 1}
        all_heads += [head._replace(name=folders.get(head.name, head.name)) for head in heads]
        frames.append(frame.with_columns(pl.col("run").replace(folders)) if folders else frame)
    return all_heads, pl.concat(frames)


def _table(heads: list[Head], measured: pl.DataFrame) -> Table:
    runs = _frame([_row(head) for head in heads])
    per_token = "environment.data.bytes_per_token"
    scale = pl.col(per_token) if per_token in runs.columns else pl.lit(None, pl.Float64)
    runs = (
        runs.join(_outcomes(measured), on="run", how="left", maintain_order="left")
        .join(_messages(measured), on=["run", "status"], how="left", maintain_order="left")
        .with_columns(
            pl.col("last_step").fill_null(0),
            pl.col("message").fill_null(""),
            bits_per_byte=pl.col("validation_loss") / math.log(2) / scale.cast(pl.Float64, strict=False),
        )
    )
    ended = [pl.col(name).cast(kind) for name, kind in OUTCOME.items()]
    return Table(runs.select(pl.exclude(OUTCOME.keys()), *ended), measured)


def _row(head: Head) -> dict[str, Any]:
    settings = flatten({key: value for key, value in head.config.items() if key != "tokens"})
    options = settings.pop("optimizer.options", ())
    for option in options if isinstance(options, tuple) else ():
        key, _, value = str(option).partition("=")
        settings[f"optimizer.options.{key}"] = _value(value)
    environment = {f"environment.{key}": value for key, value in flatten(head.environment).items()}
    row = {"run": head.name, "folder": head.folder, "status": head.status}
    return {**row, **settings, **environment, **head.measured}


def _value(option: str) -> object:
    try:
        value = decode(option)
    except ValueError:
        return option
    return option if value is None else tuple(value) if isinstance(value, list) else value


def _outcomes(measured: pl.DataFrame) -> pl.DataFrame:
    """How each run ended, from its rows in the order of steps."""
    last = ("tokens", "seconds", "validation_loss", "loss_error", "training_loss", "max_logit")
    return measured.group_by("run").agg(
        pl.col("step").max().alias("last_step"),
        *(pl.col(name).drop_nulls().last() for name in last),
        pl.col("max_logit").nan_max().alias("largest_logit"),
        pl.col("tokens_per_second").median(),
    )


def _messages(measured: pl.DataFrame) -> pl.DataFrame:
    """The last message of each kind of event of each run; a kind that ends a run is named as its status."""
    events = measured.select("run", "events").explode("events").unnest("events").drop_nulls("what")
    return events.group_by("run", pl.col("what").alias("status")).agg(pl.col("message").last())


def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
    names = dict.fromkeys(name for row in rows for name in row)
    return pl.DataFrame([_column(name, [row.get(name) for row in rows]) for name in names])


def _column(name: str, values: list[Any]) -> pl.Series:
    """A column of booleans, of numbers, of lists of numbers, or otherwise of text."""
    known = [value for value in values if value is not None]
    numbers = {type(one) for value in known for one in (value if isinstance(value, list) else [value])}
    lists = {isinstance(value, list) for value in known}
    if not known or len(lists) > 1 or (not numbers <= {int, float} and numbers != {bool}):
        return pl.Series(name, [_text(value) for value in values], dtype=pl.String)
    kind = pl.Boolean if numbers == {bool} else pl.Float64 if float in numbers else pl.Int64
    return pl.Series(name, values, dtype=pl.List(kind) if True in lists else kind, strict=False)


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
