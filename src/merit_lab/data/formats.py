"""What a file is, by its name and its first bytes; both must agree, and what is no text is refused."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

Kind = Literal["text", "JSON lines", "Parquet"]
_KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".parquet": "Parquet",
}
_PARQUET = b"PAR1"
_BEGINNING = 512  # bytes that tell what a file is
_SAMPLE = 1 << 13  # bytes on both sides of what is no UTF-8 that tell its encoding


@dataclass(frozen=True)
class _Packing:
    name: str
    beginning: bytes  # as a pattern
    open: Callable[[Path], Any]


def _open_zstd(path: Path) -> io.BufferedReader:
    import pyarrow  # type: ignore[import-untyped]

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


_PACKINGS = {
    ".gz": _Packing("gzip", rb"\x1f\x8b", gzip.open),
    ".xz": _Packing("xz", rb"\xfd7zXZ\0", lzma.open),
    ".zst": _Packing("zstd", rb"\x28\xb5\x2f\xfd", _open_zstd),
    ".bz2": _Packing("bzip2", rb"BZh[1-9]1AY&SY", bz2.open),
}

# Beginnings of files that hold no text, or hold it in a way that is not read here.
_NO_TEXT = {
    rb"%PDF-": "a PDF file: extract its text",
    rb"PK\x03\x04": "a ZIP archive, or an office document or e-book, which are such: unpack or export it",
    rb"\xd0\xcf\x11\xe0": "a document of an office program: save it as text",
    rb"\{\\rtf": "an RTF document: save it as text",
    rb"7z\xbc\xaf": "a 7z archive: unpack it",
    rb"Rar!\x1a": "a RAR archive: unpack it",
    rb"[\s\S]{257}ustar": "a tar archive: unpack it, and give the folder",
    rb"\x04\x22\x4d\x18": "packed by lz4: unpack it",
    rb"\x1f\x9d": "packed by compress: unpack it",
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a": "an image",
    rb"\x7fELF": "a program",
    rb"SQLite format 3\0": "an SQLite database: write its text as JSON lines",
    rb"\x93NUMPY": "an array of numpy",
    rb"ARROW1\0": "an Arrow file: write it as Parquet",
    rb"Obj\x01": "an Avro file: write it as Parquet",
    rb"\x89HDF": "an HDF5 file: write its text as JSON lines",
}
_JSON_LINE = rb'\s*\{\s*"[^"\n]*"\s*:'

_UTF8 = "only UTF-8 is read: convert it, for example by `iconv -f {encoding} -t UTF-8`"
_BYTE_ORDER_MARKS = {  # the longer ones first, since UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def kind_of(path: Path) -> Kind:
    """What a file holds by its name, without the suffix of its packing; text where that says nothing."""
    return _KINDS.get(_unpacked_suffix(path), "text")


def is_named(path: Path) -> bool:
    """Whether a file's name says that it is to be read when it stands in a folder that is given.

    A .json that is not packed may be anything there, most often a configuration.
    """
    return _unpacked_suffix(path) in _KINDS and path.suffix.lower() != ".json"


def named_kinds() -> str:
    """The names of files that are read, for messages."""
    return f"{', '.join(_KINDS)}, also packed ({', '.join(_PACKINGS)})"


def is_packed(path: Path) -> bool:
    """Whether a file's name says that it is packed."""
    return path.suffix.lower() in _PACKINGS


def open_unpacked(path: Path) -> BinaryIO:
    """Open a file for reading what it holds when it is unpacked."""
    packing = _PACKINGS.get(path.suffix.lower())
    return cast(BinaryIO, path.open("rb") if packing is None else packing.open(path))


@contextmanager
def naming_what_is_damaged(path: Path) -> Iterator[None]:
    """Turn the errors of all packings into one that names the file."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"{path} could not be read ({error}); if it is damaged or was cut short, make or fetch it again"
        ) from error


def check_beginning(path: Path) -> None:
    """Raise ValueError where the first bytes of a file are not what its name says, or are of no text."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    for suffix, packing in _PACKINGS.items():
        is_packed, is_said = re.match(packing.beginning, beginning), path.suffix.lower() == suffix
        if is_said and not is_packed:
            raise ValueError(
                f"{path} is named {suffix} but is not packed by {packing.name}: name it as it is"
            )
        if is_packed and not is_said:
            raise ValueError(f"{path} is packed by {packing.name}: name it so, as {path.name}{suffix}")
    with naming_what_is_damaged(path), open_unpacked(path) as unpacked:
        beginning = unpacked.read(_BEGINNING)
    is_parquet, is_said = beginning.startswith(_PARQUET), kind_of(path) == "Parquet"
    if is_parquet != is_said:
        raise ValueError(
            f"{path} is named as Parquet, but begins with {beginning[:4]!r} and not {_PARQUET!r}: rename it"
            if is_said
            else f"{path} is a Parquet file: name it so, as {path.stem}.parquet"
        )
    for pattern, meaning in _NO_TEXT.items():
        if re.match(pattern, beginning):
            raise ValueError(
                f"{path} is {meaning}. What can be read is UTF-8 text, JSON lines or Parquet: {named_kinds()}"
            )
    if _unpacked_suffix(path) not in _KINDS and re.match(_JSON_LINE, beginning):
        raise ValueError(
            f"{path} looks like JSON: name it .jsonl if each line is a document, or .txt to take it as it is"
        )
    if not is_parquet and (encoding := _wide_encoding(beginning)) is not None:
        raise ValueError(f"{path} is {encoding} text; {_UTF8.format(encoding=encoding)}")


def not_utf8(origin: str, text: bytes, error: UnicodeDecodeError) -> ValueError:
    """What to say about text that is not UTF-8."""
    import charset_normalizer

    found = charset_normalizer.from_bytes(text[max(0, error.start - _SAMPLE) : error.start + _SAMPLE]).best()
    surroundings = text[max(0, error.start - 20) : error.end + 20]
    looks_like = "" if found is None else f"; it may be {found.encoding}"
    way_out = _UTF8.format(encoding="ENCODING" if found is None else found.encoding)
    return ValueError(
        f"{origin} is not UTF-8 text ({error.reason}) near {surroundings!r}{looks_like}. With this tokenizer "
        f"{way_out}; or use the tokenizer 'bytes', which takes text in any encoding"
    )


def _unpacked_suffix(path: Path) -> str:
    return Path(path.stem if is_packed(path) else path.name).suffix.lower()


def _wide_encoding(beginning: bytes) -> str | None:
    """UTF-16 or UTF-32, by the mark at the beginning or by the zeros between Latin letters."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if beginning.startswith(mark):
            return encoding
    if len(beginning) < 8:
        return None
    even, odd = (beginning[side::2].count(0) / len(beginning[side::2]) for side in (0, 1))
    if odd > 0.5 and even < 0.1:
        return "UTF-16LE"
    if even > 0.5 and odd < 0.1:
        return "UTF-16BE"
    return None
