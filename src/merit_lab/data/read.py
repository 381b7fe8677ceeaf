"""Documents of text files: plain, JSON lines or Parquet, compressed or not, cut into pieces.

A file's format follows from its name. Its first bytes must agree, since a wrong guess would silently train on
rubbish.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

PIECE_BYTES = 1 << 16  # documents are cut into pieces of about this size
_ROWS = 256  # of a Parquet file, read at a time
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
_ONE_OBJECT = "the file must have one JSON object on each line"
_JSON_LINE = rb'\s*\{\s*"[^"\n]*"\s*:'

# A space or a newline after any character but white space: GPT-2's splitting pattern, which our BPE uses too,
# never joins the two, and no UTF-8 character is cut.
_CUT = re.compile(
    rb"[ \n](?<=[!-~\x80-\xbf][ \n])(?<!\xc2[\x85\xa0][ \n])(?<!\xe1\x9a\x80[ \n])"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf][ \n])(?<!\xe2\x81\x9f[ \n])(?<!\xe3\x80\x80[ \n])"
)


def texts(path: Path, field: str = "text", separator: str | None = None) -> Iterator[tuple[str, bytes, bool]]:
    """Yield a file's documents in pieces: where it is from, its text, and whether its document ends with it.

    A document without text yields nothing.

    Args:
        path: the file.
        field: the field of a JSON object, or the column of a Parquet file, that holds the text.
        separator: the line between the documents of a text file; without it the file is one document.
    """
    kind = _kind(path)
    with _naming_damaged(path), _opened(path) as file:
        found: Iterable[tuple[str, Iterable[bytes]]]
        if kind == "JSON lines":
            found = _json_lines(path, file, field)
        elif kind == "Parquet":
            found = _parquet_rows(path, field)
        elif separator is None:
            found = [(str(path), iter(lambda: file.read(PIECE_BYTES), b""))]
        else:
            found = _separated(path, file, separator)
        for origin, blocks in found:
            for text, ends in cut(blocks, PIECE_BYTES):
                yield origin, text, ends


def cut(blocks: Iterable[bytes], size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield a text in pieces, and whether a piece is the last.

    Each is cut at the first good place after ``size`` bytes: tokenizing the pieces one by one gives the
    tokens of the whole. Without a good place, a piece is as long as it must be.
    """
    text = bytearray()
    searched = 0  # there is no good place before this; it is not searched again when more is read
    for block in blocks:
        text += block
        while (place := _CUT.search(text, max(size + 1, searched))) is not None:
            yield bytes(text[: place.start()]), False
            del text[: place.start()]  # in no time: it only moves the beginning
            searched = 0
        searched = len(text)
    if text:
        yield bytes(text), True


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
            files = files_below(path, lambda name: name.startswith("."))
            named = [
                file for file in files if file.suffix.lower() != ".json" and _inner_suffix(file) in _KINDS
            ]
            if not named:
                raise ValueError(
                    f"{path} has no file whose name ends with one of {NAMES}: name the files explicitly, for "
                    f"example {path}/*"
                )
            selected += named
            skipped += sorted({*files} - {*named})
        elif path.is_file():
            selected.append(path)
        else:
            raise ValueError(f"there is no file {path}")
    for path in selected:
        _check_beginning(path)
    return selected, skipped


NAMES = f"{', '.join(_KINDS)}, also compressed ({', '.join(_COMPRESSIONS)})"


def files_below(folder: Path, is_skipped: Callable[[str], bool]) -> list[Path]:
    """Return the files below a folder in the order of their paths, but those in or with skipped names."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_skipped(name)]
        found += [Path(parent, name) for name in names if not is_skipped(name)]
    return sorted(path for path in found if path.is_file())  # not a broken link


def has_line(path: Path, separator: str) -> bool:
    """Whether a text file has a separator line; JSON lines and Parquet have documents without."""
    with _naming_damaged(path), _opened(path) as file:
        return _kind(path) == "text" and any(line.strip() == separator.strip().encode() for line in file)


def not_utf8(origin: str, text: bytes, error: UnicodeDecodeError) -> ValueError:
    """Return an error about text that is not UTF-8."""
    surroundings = text[max(0, error.start - 20) : error.end + 20]
    return ValueError(
        f"{origin} is not UTF-8 text ({error.reason}) near {surroundings!r}. Convert it, for example with "
        "`iconv -f ENCODING -t UTF-8`, or use the tokenizer 'bytes', which accepts any encoding"
    )


def _json_lines(path: Path, file: BinaryIO, field: str) -> Iterator[tuple[str, list[bytes]]]:
    for number, line in enumerate(file, 1):
        origin = f"{path}, line {number},"
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise not_utf8(origin, line, error) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{origin} cannot be read as JSON ({error}): {_ONE_OBJECT}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{origin} is {_described(value)}: {_ONE_OBJECT}")
        if field not in value:
            raise _without(field, f"{origin} has no field", value)
        yield origin, [_text(origin, field, value[field])]


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[str, list[bytes]]]:
    import polars as pl

    try:
        frame = pl.scan_parquet(path.absolute(), glob=False)
        columns = frame.collect_schema().names()
        if field not in columns:
            raise _without(field, f"{path} has no column", columns)
        rows = frame.select(pl.col(field)).collect_batches(chunk_size=_ROWS)
        values = itertools.chain.from_iterable(part[field].to_list() for part in rows)
        for number, value in enumerate(values, 1):
            origin = f"{path}, row {number},"
            yield origin, [_text(origin, field, value)]
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise OSError(str(error)) from error


def _text(origin: str, field: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(
            f"{origin} has {_described(value)} in {field!r}, which must be text: leave that document out, or "
            "name another with --field"
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{origin} has half a character in {field!r}, at {error.start}: {value[error.start]!r}"
        ) from None


def _separated(path: Path, file: BinaryIO, separator: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    wanted, number = separator.strip().encode(), 0
    for is_separator, lines in itertools.groupby(file, key=lambda line: line.strip() == wanted):
        if not is_separator:
            number += 1
            yield f"{path}, document {number},", lines


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


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _without(field: str, place: str, names: Iterable[str]) -> ValueError:
    """Return an error about a missing field."""
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
    return ValueError(
        f"{place} {field!r}, but {', '.join(shown[:10]) or 'none'}{more}: name the one that holds the text "
        "with --field"
    )
