"""runs.parquet: the records of kept runs in one table, small enough for version control.

First a row for each run, then a row for each logged step:

    run            the run's name
    status         how it ended; this and the next three are null in the rows of steps
    config         its config.json
    environment    its environment.json, without paths
    measured       what was measured of it after training, by the names of measurements.py
    step, ...      the columns of the frame of steps (steps.py); null in the row of the run

Numbers of steps have five digits, those of single heads and parameters three, and curves have fewer points:
THINNED.
Beside it is the sha256 of its content, as ``sha256sum`` writes it: `runs.parquet.sha256`. It is checked
whenever the file is read.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from merit_lab.folders import refuse_file
from merit_lab.json_values import decode, encode, with_nan
from merit_lab.runs import durable
from merit_lab.runs.steps import COLUMNS, LOGGED, OF_PARAMETERS

THINNED: Mapping[tuple[str, ...], int] = {LOGGED: 50, ("max_logits",): 11, ("updates",): 6, ("entropies",): 3}
"""How many rows of a run keep these columns, at most; the first and the last are among them."""

_DIGITS, _DIGITS_OF_ONE = 5, 3
_HEAD = ("status", "config", "environment", "measured")
_SCHEMA: Mapping[str, Any] = {"run": pl.String, **dict.fromkeys(_HEAD, pl.String), **COLUMNS}
_OF_ITS_MACHINE = ("command", "folder", "host")


class Head(NamedTuple):
    """What a run is, without its steps."""

    name: str
    folder: str
    status: str
    config: dict[str, Any]
    environment: dict[str, Any]
    measured: dict[str, Any]
    last_loss: float | None = None
    """The last validation loss, of a kept run."""


def read(path: Path) -> tuple[list[Head], pl.DataFrame]:
    """Return the runs of a file, and the frame of their steps."""
    frame = _read(path, _checked(path))
    steps = frame.filter(pl.col("step").is_not_null()).select(list(COLUMNS))
    losses = dict(
        steps.drop_nulls("validation_loss").group_by("run").agg(pl.last("validation_loss")).iter_rows()
    )
    heads = []
    for name, status, *texts in frame.filter(pl.col("step").is_null()).select("run", *_HEAD).iter_rows():
        config, environment, measured = map(decode, texts)
        folder, loss = f"{path}/{name}", losses.get(name)
        heads.append(Head(name, folder, status, config, environment, with_nan(measured), loss))
    return heads, steps


def kept(path: Path) -> dict[str, Head]:
    """Return the runs of a file by name; it is read again only when it has changed."""
    return _kept(path.absolute(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _kept(path: Path, _: int) -> dict[str, Head]:
    return {head.name: head for head in read(path)[0]}


def add(path: Path, heads: Iterable[Head], steps: pl.DataFrame) -> None:
    """Add runs to a file, which is created if needed; runs that are there stay as they are.

    If it fails, or is killed, the file is unchanged.
    """
    refuse_file(path.parent)
    before = _checked(path) if path.exists() else None
    old = pl.DataFrame(schema=dict(_SCHEMA)) if before is None else _read(path, before)
    counts = dict(steps.filter(pl.col("training_loss").is_not_null())["run"].value_counts().iter_rows())
    rows = [_row(head, counts.get(head.name, 0)) for head in heads]
    names = [row["run"] for row in rows]
    if twice := set(names) & set(old["run"]):
        raise ValueError(f"{path} already has a run {min(twice)}; choose another file for the new one")
    new = thinned(steps.filter(pl.col("run").is_in(names)))
    parts = [pl.DataFrame(rows, schema_overrides={"step": pl.Int64}), new]
    _replace(path, pl.concat([old, *(_whole(part) for part in parts)]), before)


def thinned(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps with fewer digits, and with at most as many points of each curve as THINNED says."""
    steps = steps.with_row_index("place")
    for columns, most in THINNED.items():
        measured = steps.filter(pl.any_horizontal(pl.col(columns).is_not_null()))
        of_runs = measured.group_by("run", maintain_order=True).agg("place")["place"]
        chosen = [place for places in of_runs.to_list() for place in _spread(places, most)]
        steps = steps.with_columns(
            pl.when(pl.col("place").is_in(chosen)).then(pl.col(name)) for name in columns
        )
    one, item = pl.element().round_sig_figs(_DIGITS_OF_ONE), pl.element().struct
    fields = [item.field(name).round_sig_figs(_DIGITS_OF_ONE) for name in OF_PARAMETERS]
    measured_there = pl.any_horizontal(pl.exclude("place", "run", "step", "tokens").is_not_null())
    return (
        steps.filter(measured_there)
        .drop("place")
        .with_columns(
            pl.col(pl.Float64).round_sig_figs(_DIGITS),
            pl.col("max_logits", "entropies").list.eval(pl.element().list.eval(one)),
            pl.col("updates").list.eval(pl.struct(item.field("parameter"), *fields)),
        )
    )


def _row(head: Head, num_logged: int) -> dict[str, Any]:
    config, environment = dict(head.config), dict(head.environment)
    if isinstance(config.get("data"), str):
        config["data"] = Path(config["data"]).name
    for key in _OF_ITS_MACHINE:
        environment.pop(key, None)
    data = environment.get("data", {})
    if isinstance(data.get("folder"), str):
        environment["data"] = {**data, "folder": Path(data["folder"]).name}
    environment.setdefault("excerpt_of", {"digits": _DIGITS, "train": num_logged})
    texts = map(encode, (config, environment, head.measured))
    return {"run": head.name, **dict(zip(_HEAD, [head.status, *texts], strict=True)), "step": None}


def _spread(places: list[int], most: int) -> list[int]:
    """At most ``most`` places: the first, the last, and one from each of equal stretches between.

    The place within its stretch is random, since an even stride may select exactly the monitored steps, which
    are slower. The random numbers are the same each time, so that seeds of one setting keep the same steps.
    """
    if len(places) <= most:
        return places
    lots = random.Random(0)
    first, *between, last = places
    borders = [number * len(between) // (most - 2) for number in range(most - 1)]
    drawn = [between[begin + int(lots.random() * (end - begin))] for begin, end in pairwise(borders)]
    return [first, *drawn, last]


def _whole(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with all columns, null where it had none."""
    missing = [pl.lit(None, kind).alias(name) for name, kind in _SCHEMA.items() if name not in frame.columns]
    return frame.with_columns(missing).select(list(_SCHEMA))


def _read(path: Path, content: bytes) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(io.BytesIO(content))
    except (pl.exceptions.PolarsError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file that was kept") from None
    if not frame.schema.items() <= _SCHEMA.items() or not {"run", *_HEAD, "step"} <= set(frame.columns):
        raise ValueError(
            f"{path} has other columns than this version of merit-optim reads; give a file that `merit keep` "
            "wrote, or use the version that wrote it"
        )
    return _whole(frame)  # what was not yet measured when it was kept is null


def _checked(path: Path) -> bytes:
    """The content of a file whose hash is beside it."""
    content, beside = path.read_bytes(), hash_path(path)
    if not beside.is_file():
        raise ValueError(
            f"{beside} is missing, so nothing says whether {path} is as it was kept: restore it or, if you "
            f"trust the file, write it (cd {path.parent} && sha256sum {path.name} > {beside.name})"
        )
    known = [line.split(maxsplit=1)[:1] for line in beside.read_bytes().splitlines()]
    if [_hash(content).encode()] not in known:
        raise ValueError(
            f"{path} is not as it was kept: its sha256 is not that in {beside.name}; restore both files"
        )
    return content


def _replace(path: Path, frame: pl.DataFrame, before: bytes | None) -> None:
    """Write a file and its hash, unless the file has changed since ``before`` was read.

    For a moment the hash of the old content stands below that of the new one: whenever the process is killed,
    the file is one that its hashes know.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    frame.write_parquet(buffer, compression="zstd", compression_level=19)
    content, beside = buffer.getvalue(), hash_path(path)
    line = f"{_hash(content)}  {path.name}\n"
    with durable.replacing(path) as partial:
        partial.write_bytes(content)
        if before != (path.read_bytes() if path.exists() else None):
            raise ValueError(f"{path} was changed by another process in the meantime; repeat the command")
        durable.write(beside, line + ("" if before is None else f"{_hash(before)}  {path.name}\n"))
    durable.write(beside, line)


def hash_path(path: Path) -> Path:
    """The file with the hash of a file."""
    return path.with_name(f"{path.name}.sha256")


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
