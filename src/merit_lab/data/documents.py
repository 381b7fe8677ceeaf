"""Read documents from text files: plain, JSON lines or Parquet, compressed or not."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from merit_lab.data import formats
from merit_lab.data.pieces import Readable, cut

_PARQUET_ROWS = 256  # read at a time
_LINE = 1 << 16  # bytes of a very long line read at a time


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the documents are in a file.

    Args:
        field: the field of a JSON object, or the column of a Parquet file, that holds the text.
        separator: the line between the documents of a text file; without it the file is one document.
    """

    field: str = "text"
    separator: str | None = None


DEFAULT_LAYOUT = Layout()


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files to read, those of a folder in the order of their paths, and the skipped ones."""
    selected: list[Path] = []
    left_out: list[Path] = []
    for path in paths:
        if path.is_dir():
            files = sorted(_files_below(path))
            named = [file for file in files if formats.is_named(file)]
            if not named:
                raise ValueError(
                    f"{path} has no file whose name ends with one of {formats.named_kinds()}: name the files "
                    f"explicitly, for example {path}/*"
                )
            selected += named
            left_out += [file for file in files if not formats.is_named(file)]
        elif path.is_file():
            selected.append(path)
        else:
            raise ValueError(f"there is no file {path}")
    return selected, left_out


def texts(path: Path, layout: Layout, size: int) -> Iterator[tuple[str, bytes, bool]]:
    """Yield a file's documents in pieces of about ``size`` bytes: origin, text, whether it is the last piece.

    A document without text yields nothing.
    """
    with formats.naming_damaged_files(path):
        for origin, content in _documents(path, layout):
            yield from ((origin, text, is_last) for text, is_last in _marking_last(cut(content, size)))


def _documents(path: Path, layout: Layout) -> Iterator[tuple[str, Readable]]:
    kind = formats.kind_of(path)
    with formats.open_decompressed(path) as file:
        if kind == "JSON lines":
            yield from _json_lines(path, file, layout.field)
        elif kind == "Parquet":
            yield from _parquet_rows(path, file, layout.field)
        elif layout.separator is None:
            yield str(path), file
        else:
            yield from _separated(path, file, layout.separator.encode())


def _json_lines(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[str, Readable]]:
    for number, line in enumerate(file, 1):
        origin = f"{path}, line {number},"
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise formats.not_utf8(origin, line, error) from None
        except ValueError as error:
            raise ValueError(
                f"{origin} is not JSON ({error}): the file must have one JSON object on each line"
            ) from None
        if not isinstance(value, dict):
            raise ValueError(
                f"{origin} is {_described(value)}: the file must have one JSON object on each line"
            )
        if field not in value:
            raise ValueError(
                f"{origin} has no field {field!r}, but {_listed(value)}: name the one that holds the text "
                "with --field"
            )
        yield origin, _text(origin, field, value[field])


def _parquet_rows(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[str, Readable]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    with tempfile.TemporaryFile() as unpacked:
        if formats.is_compressed(path):  # Parquet is read from its end
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
        try:
            table = parquet.ParquetFile(unpacked if formats.is_compressed(path) else file)
            columns = table.schema_arrow.names
            if field not in columns:
                raise ValueError(
                    f"{path} has no column {field!r}, but {_listed(columns)}: name the one that holds the "
                    "text with --field"
                )
            number = 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    origin = f"{path}, row {number},"
                    yield origin, _text(origin, field, value)
        except pyarrow.ArrowException as error:
            raise OSError(str(error)) from error


def _text(origin: str, field: str, value: Any) -> io.BytesIO:
    if not isinstance(value, str):
        raise ValueError(
            f"{origin} has {_described(value)} in {field!r}, which must be text: leave that document out, or "
            "name another with --field"
        )
    try:
        return io.BytesIO(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{origin} has half a character in {field!r}, at {error.start}: {value[error.start]!r}"
        ) from None


def _separated(path: Path, file: BinaryIO, separator: bytes) -> Iterator[tuple[str, Readable]]:
    for number in itertools.count(1):
        section = _Section(file, separator)
        yield f"{path}, document {number},", section
        if section.is_last:
            return


def has_line(path: Path, separator: str) -> bool:
    """Whether a text file has a separator line; JSON lines and Parquet have documents without."""
    if formats.kind_of(path) != "text":
        return False
    with formats.open_decompressed(path) as file:
        section = _Section(file, separator.encode())
        while section.read(_LINE):
            pass
        return not section.is_last


class _Section:
    """A file up to the next separator line or its end."""

    def __init__(self, file: BinaryIO, separator: bytes) -> None:
        self._file, self._separator = file, separator.strip()
        self._ended = False
        self._at_line_start = True
        self.is_last = False

    def read(self, size: int, /) -> bytes:
        lines: list[bytes] = []
        num_bytes = 0
        while num_bytes < size and not self._ended:
            line = self._file.readline(_LINE)
            if not line:
                self._ended = self.is_last = True
            elif self._at_line_start and line.strip() == self._separator:
                self._ended = True
            else:
                lines.append(line)
                num_bytes += len(line)
                self._at_line_start = line.endswith(b"\n")
        return b"".join(lines)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, except hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()
        )


def _marking_last(items: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    iterator = iter(items)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held, following is None
        held = following


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "") or "none"
