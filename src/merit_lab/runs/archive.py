"""runs.parquet: the records of several runs in one compressed Parquet table.

A run is a list of lines: its configuration, its environment, and those of its metrics.jsonl. The table has
a row for each field of each line (see flat_fields.py), all in order:

    run      the run's name
    line     the line's index: 0 configuration, 1 environment, then the measurements
    kind     "config", "environment", or the measurement's
    step     the measurement's; 0 for configuration and environment
    field    the field's name: loss, max_logits[3][1], parameters["head.weight"].clipped
    value    the number, including NaN and infinities; null if it is not a number
    json     the value as JSON if it is not a float, otherwise null

So any tool can query numbers, and reading returns exactly what was written: ints and floats are distinct.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from merit_lab.folders import refuse_file
from merit_lab.runs import durable, flat_fields
from merit_optim.spelling import did_you_mean

if TYPE_CHECKING:
    from merit_lab.runs.excerpt import Excerpt

_FORMAT = {b"merit-optim runs": b"1"}
_WORDS = pa.dictionary(pa.int32(), pa.string())
_SCHEMA = pa.schema(
    [
        ("run", _WORDS),
        ("line", pa.int32()),
        ("kind", _WORDS),
        ("step", pa.int64()),
        ("field", _WORDS),
        ("value", pa.float64()),
        ("json", _WORDS),
    ],
    metadata=_FORMAT,
)
_NONE = -1  # index of a null word
_HEAD = ("config", "environment")
_LEVEL = 15  # of zstd: a file is written once and read often
_DICTIONARY = 2**26  # bytes: rounded numbers repeat more over all runs than over a few thousand rows

Line = dict[str, Any]


def names_in(path: Path) -> list[str]:
    """Return the names of the runs in a file, in its order."""
    return list(_open(path).places)


def read_head(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration and the environment of a run."""
    (_, _, config), (_, _, environment) = _open(path).lines(name, slice(len(_HEAD)))
    return config, environment


def read_lines(path: Path, name: str) -> Iterator[Line]:
    """Yield the measurements of a run, as ``read_metrics`` does."""
    for kind, step, rest in _open(path).lines(name, slice(len(_HEAD), None)):
        yield {"kind": kind, "step": step, **rest}


def add(path: Path, runs: Iterable[Excerpt]) -> None:
    """Add runs to a file, which is created if needed; existing runs are kept.

    If it fails, the file is unchanged.
    """
    refuse_file(path.parent)
    before = _version(path) if path.exists() else None
    new = {run.name: _table(run) for run in runs}
    there = _open(path) if before else None
    if there and (twice := there.places.keys() & new):
        raise ValueError(f"{path} already has a run {min(twice)}; choose another file for the new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, _joined([*([there.table] if there else []), *new.values()]), before)


def remove(path: Path, names: Iterable[str]) -> None:
    """Remove runs from a file, and the file with the last of them.

    If it fails, the file is unchanged.
    """
    if not path.is_file():
        raise ValueError(f"there is no {path}, so no run is kept in it")
    before, there, gone = _version(path), _open(path), set(names)
    for name in gone - there.places.keys():
        hint = did_you_mean(name, there.places)
        raise ValueError(f"{path} keeps no run {name!r}{hint} `merit show {path}` lists those that it keeps")
    left = [
        there.table.slice(rows.start, len(rows)) for name, rows in there.places.items() if name not in gone
    ]
    if left:
        _replace(path, _with_used_words(_joined(left)), before)
    else:
        path.unlink()


def _replace(path: Path, table: Any, before: tuple[int, int] | None) -> None:
    """Replace the table of a file, which must still be the version that the new one was made from."""
    with durable.replacing(path) as partial:
        pq.write_table(
            table,
            partial,
            compression="zstd",
            compression_level=_LEVEL,
            dictionary_pagesize_limit=_DICTIONARY,
        )
        if before != (_version(path) if path.exists() else None):
            raise ValueError(f"{path} was changed by another process in the meantime; repeat the command")


@dataclass(frozen=True)
class _File:
    """A file's table, the rows of each run, and the dictionaries of its string columns."""

    table: Any
    places: dict[str, range]
    kinds: Sequence[str]
    paths: Sequence[flat_fields.Path]
    texts: Sequence[str]
    makers: dict[tuple[int, ...], flat_fields.Maker]
    """Functions that build a line from its values, by its fields; filled as lines are read."""

    def lines(self, name: str, wanted: slice) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield some of a run's lines: kind, step and the rest of each."""
        span = self.places[name]
        part = self.table.slice(span.start, len(span))
        stretches = list(_stretches(part["line"].chunk(0)))[wanted]
        first, last = (stretches[0][0], stretches[-1][1]) if stretches else (0, 0)
        kinds, steps, names, values, texts = (
            _plain(part[column].chunk(0)[first:last]) for column in ("kind", "step", "field", "value", "json")
        )
        for place, text in enumerate(texts):
            if text != _NONE:
                values[place] = json.loads(self.texts[text])
        for begin, end in stretches:
            rows = slice(begin - first, end - first)
            make = self._maker(tuple(names[rows]))
            yield self.kinds[kinds[rows.start]], steps[rows.start], make(iter(values[rows]))

    def _maker(self, names: tuple[int, ...]) -> flat_fields.Maker:
        if names not in self.makers:
            self.makers[names] = flat_fields.maker_of([self.paths[name] for name in names])
        return self.makers[names]


def _plain(column: Any) -> list[Any]:
    """Return a column as Python numbers; strings as indices into the dictionary, _NONE for null."""
    numbers = column.indices.fill_null(_NONE) if pa.types.is_dictionary(column.type) else column
    values: list[Any] = numbers.to_numpy(zero_copy_only=False).tolist()
    return values


def _open(path: Path) -> _File:
    return _load(path.absolute(), _version(path))  # the cache must not depend on the current folder


def _version(path: Path) -> tuple[int, int]:
    """Return a value that changes with the file's content."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _load(path: Path, _: tuple[int, int]) -> _File:
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read ({error}); restore the file that was kept") from None
    if table.schema != _SCHEMA or not _FORMAT.items() <= (table.schema.metadata or {}).items():
        raise ValueError(
            f"{path} has other columns than this version of merit-optim reads; give a file that `merit keep` "
            "wrote, or use the version that wrote it"
        )
    table = _joined([table])
    kinds, names, texts = (_words(table, column) for column in ("kind", "field", "json"))
    return _File(table, _places(table), kinds, [flat_fields.path_of(name) for name in names], texts, {})


def _places(table: Any) -> dict[str, range]:
    """Return the rows of each run, which are contiguous."""
    names, words = table["run"].chunk(0).indices, _words(table, "run")
    return {words[names[begin].as_py()]: range(begin, end) for begin, end in _stretches(names)}


def _stretches(column: Any) -> Iterator[tuple[int, int]]:
    """Yield where each stretch of equal numbers begins and ends."""
    return pairwise([0, *pc.run_end_encode(column).run_ends.to_pylist()])


def _words(table: Any, column: str) -> list[str]:
    words: list[str] = table[column].chunk(0).dictionary.to_pylist()
    return words


def _joined(tables: Sequence[Any]) -> Any:
    """Join tables into one chunk, with one dictionary per string column."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _with_used_words(table: Any) -> Any:
    """A table whose dictionaries hold only words that it uses, without those of removed rows."""
    plain = pa.schema(
        [(column.name, pa.string() if column.type == _WORDS else column.type) for column in _SCHEMA]
    )
    return _joined([table.cast(plain).cast(_SCHEMA)])


def _table(run: Excerpt) -> Any:
    rows = [
        (run.name, place, kind, step, name, _number(value), _text(value))
        for place, (kind, step, rest) in enumerate(_lines_of(run))
        for name, value in flat_fields.fields_of(rest)
    ]
    return pa.table(dict(zip(_SCHEMA.names, zip(*rows, strict=True), strict=True)), schema=_SCHEMA)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return None if isinstance(value, float) else json.dumps(value)


def _lines_of(run: Excerpt) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for kind, settings in zip(_HEAD, (run.config, run.environment), strict=True):
        yield kind, 0, settings
    for line in run.lines:
        yield line["kind"], line["step"], {key: line[key] for key in line if key not in ("kind", "step")}
