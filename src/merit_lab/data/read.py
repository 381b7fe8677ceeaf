"""Documents of text files: plain, JSON lines or Parquet, compressed or not, cut into pieces.

A file's format follows from its name. Its first bytes must agree, since a wrong guess would silently train on
rubbish.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import SupportsRead

PIECE_BYTES = 1 << 16  # documents are cut into pieces of about this size
_ROWS = 256  # of a Parquet file, read at a time
_LINE = 1 << 16  # bytes of a very long line, read at a time
_BEGINNING = 512  # bytes by which a format is checked

_KINDS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".parquet": "Parquet",
}


def _open_zstd(path: Path) -> BinaryIO:
    # Not the package zstandard: it ends a truncated file without an error.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return cast(BinaryIO, zstd.open(path))


_COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
    ".bz2": bz2.open,
}
# PDF, RTF, zstd, and UTF-16 by its mark; anything with control characters: what is packed, Parquet, office
# documents, UTF-16.
_NOT_TEXT = rb"%PDF-|\{\\rtf|\x28\xb5\x2f\xfd|\xff\xfe|\xfe\xff|[\s\S]*[\0-\x08\x0e-\x1a\x1c-\x1f]"
_JSON_LINE = rb'\s*\{\s*"[^"\n]*"\s*:'

# A space or a newline after any character but white space: GPT-2's splitting pattern, which our BPE uses too,
# never joins the two, and no UTF-8 character is cut.
_CUT = re.compile(
    rb"[ \n](?<=[!-~\x80-\xbf][ \n])(?<!\xc2[\x85\xa0][ \n])(?<!\xe1\x9a\x80[ \n])"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf][ \n])(?<!\xe2\x81\x9f[ \n])(?<!\xe3\x80\x80[ \n])"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the documents are in a file.

    Args:
        field: the field of a JSON object, or the column of a Parquet file, that holds the text.
        separator: the line between the documents of a text file; without it the file is one document.
    """

    field: str = "text"
    separator: str | None = None


def texts(path: Path, layout: Layout) -> Iterator[tuple[str, bytes, bool]]:
    """Yield a file's documents in pieces: where it is from, its text, and whether its document ends with it.

    A document without text yields nothing.
    """
    kind = _kind(path)
    with _naming_damaged(path), _opened(path) as file:
        found: Iterator[tuple[str, SupportsRead[bytes]]]
        if kind == "JSON lines":
            found = _json_lines(path, file, layout.field)
        elif kind == "Parquet":
            found = _parquet_rows(path, layout.field)
        elif layout.separator is None:
            found = iter([(str(path), file)])
        else:
            found = _separated(path, file, layout.separator.encode())
        for origin, content in found:
            held = b""
            for text in cut(content, PIECE_BYTES):
                if held:
                    yield origin, held, False
                held = text
            if held:
                yield origin, held, True


def cut(file: SupportsRead[bytes], size: int) -> Iterator[bytes]:
    """Yield a file in pieces, each cut at the first good place after ``size`` bytes.

    Tokenizing the pieces one by one gives the tokens of the whole. Without a good place, a piece is as long
    as it must be.
    """
    text, begin = b"", 0  # the buffer, and where the next piece begins in it
    searched = 0  # there is no good place before this; it is not searched again when more is read
    # Doubling the buffer keeps the time linear if no cut is found for long.
    while block := file.read(max(size, len(text) - begin)):
        searched -= begin
        text, begin = text[begin:] + block, 0
        while (place := _CUT.search(text, max(begin + size + 1, searched))) is not None:
            yield text[begin : place.start()]
            begin = searched = place.start()
        searched = len(text)
    if text[begin:]:
        yield text[begin:]


def nearest_cut(text: bytes, wanted: float) -> int | None:
    """Return the good place to cut a text that is nearest to an offset; None if it has none."""
    places = [place.start() for place in _CUT.finditer(text)]
    return min(places, key=lambda place: abs(place - wanted), default=None)


def find_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Return the files to read, those of a folder in the order of their paths, and the skipped ones.

    A plain .json in a folder is skipped: it is most often a configuration.
    """
    if not paths:
        raise ValueError("no files are given; name at least one")
    selected: list[Path] = []
    skipped: list[Path] = []
    for path in paths:
        if path.is_dir():
            num_before = len(selected)
            for file in sorted(_files_below(path)):
                is_named = _inner_suffix(file) in _KINDS and file.suffix.lower() != ".json"
                (selected if is_named else skipped).append(file)
            if len(selected) == num_before:
                raise ValueError(
                    f"{path} has no file whose name ends with one of {NAMES}: name the files explicitly, for "
                    f"example {path}/*"
                )
        elif path.is_file():
            selected.append(path)
        else:
            raise ValueError(f"there is no file {path}")
    for path in selected:
        _check_beginning(path)
    return selected, skipped


NAMES = f"{', '.join(_KINDS)}, also compressed ({', '.join(_COMPRESSIONS)})"


def has_line(path: Path, separator: str) -> bool:
    """Whether a text file has a separator line; JSON lines and Parquet have documents without."""
    if _kind(path) != "text":
        return False
    with _naming_damaged(path), _opened(path) as file:
        section = _Section(file, separator.encode())
        while section.read():
            pass
        return not section.is_last


def not_utf8(origin: str, text: bytes, error: UnicodeDecodeError) -> ValueError:
    """Return an error about text that is not UTF-8."""
    surroundings = text[max(0, error.start - 20) : error.end + 20]
    return ValueError(
        f"{origin} is not UTF-8 text ({error.reason}) near {surroundings!r}. Convert it, for example with "
        "`iconv -f ENCODING -t UTF-8`, or use the tokenizer 'bytes', which accepts any encoding"
    )


def _json_lines(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[str, SupportsRead[bytes]]]:
    for number, line in enumerate(file, 1):
        origin = f"{path}, line {number},"
        if not line.strip():
            continue
        wanted = "the file must have one JSON object on each line"
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise not_utf8(origin, line, error) from None
        except ValueError as error:
            raise ValueError(f"{origin} is not JSON ({error}): {wanted}") from None
        except RecursionError:
            raise ValueError(f"{origin} is nested too deep to be read: leave it out") from None
        if not isinstance(value, dict):
            raise ValueError(f"{origin} is {_described(value)}: {wanted}")
        if field not in value:
            raise ValueError(
                f"{origin} has no field {field!r}, but {_listed(value)}: name the one that holds the text "
                "with --field"
            )
        yield origin, _text(origin, field, value[field])


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[str, SupportsRead[bytes]]]:
    import polars as pl

    try:
        frame = pl.scan_parquet(path.absolute(), glob=False)
        columns = frame.collect_schema().names()
        if field not in columns:
            raise ValueError(
                f"{path} has no column {field!r}, but {_listed(columns)}: name the one that holds the text "
                "with --field"
            )
        rows = frame.select(pl.col(field)).collect_batches(chunk_size=_ROWS)
        values = itertools.chain.from_iterable(part[field].to_list() for part in rows)
        for number, value in enumerate(values, 1):
            origin = f"{path}, row {number},"
            yield origin, _text(origin, field, value)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
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


def _separated(path: Path, file: BinaryIO, separator: bytes) -> Iterator[tuple[str, SupportsRead[bytes]]]:
    for number in itertools.count(1):
        section = _Section(file, separator)
        yield f"{path}, document {number},", section
        if section.is_last:
            return


class _Section:
    """A file up to the next separator line or its end."""

    def __init__(self, file: BinaryIO, separator: bytes) -> None:
        self._file, self._separator = file, separator.strip()
        self._ended = False
        self._at_line_start = True
        self.is_last = False

    def read(self, size: int = _LINE, /) -> bytes:
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


def _check_beginning(path: Path) -> None:
    """Raise ValueError if a file cannot be what its name says: a wrong guess would train on rubbish."""
    with _naming_damaged(path), _opened(path) as file:
        beginning = file.read(_BEGINNING)
    if _kind(path) != "Parquet" and re.match(_NOT_TEXT, beginning):
        raise ValueError(
            f"{path} is not text: unpack an archive, extract the text of a document, convert UTF-16 with "
            f"`iconv -f UTF-16 -t UTF-8`; what is packed or Parquet must be named so: {NAMES}"
        )
    if _inner_suffix(path) not in _KINDS and re.match(_JSON_LINE, beginning):
        raise ValueError(
            f"{path} looks like JSON: name it .jsonl if each line is a document, or .txt to read it as text"
        )


@contextmanager
def _naming_damaged(path: Path) -> Iterator[None]:
    """Convert the errors of all formats to one that names the file."""
    try:
        yield
    except Exception as error:
        # By name the error of a module that is imported when needed.
        is_damaged = isinstance(error, EOFError | OSError | lzma.LZMAError | zlib.error)
        if not is_damaged and type(error).__name__ != "ZstdError":
            raise
        raise ValueError(
            f"{path} could not be read ({error}): it is not what its name says, or is damaged or truncated; "
            "rename it, or create or download it again"
        ) from error


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed content."""
    open_packed = _COMPRESSIONS.get(path.suffix.lower())
    return path.open("rb") if open_packed is None else cast(BinaryIO, open_packed(path))


def _kind(path: Path) -> str:
    return _KINDS.get(_inner_suffix(path), "text")


def _inner_suffix(path: Path) -> str:
    return Path(path.stem if path.suffix.lower() in _COMPRESSIONS else path.name).suffix.lower()


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, except hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (
            path for name in names if not name.startswith(".") and (path := Path(parent, name)).is_file()
        )


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _listed(names: Iterable[str]) -> str:
    shown = [repr(name) for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "") or "none"
