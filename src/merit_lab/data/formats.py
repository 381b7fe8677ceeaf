"""Detect file formats by name and first bytes. Both must agree, and files that are not text are refused."""

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

FileKind = Literal["text", "JSON lines", "Parquet"]
_KINDS: dict[str, FileKind] = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".parquet": "Parquet",
}
_PARQUET = b"PAR1"
_BEGINNING = 512  # bytes from which the format is detected
_SAMPLE = 1 << 13  # bytes on both sides of invalid UTF-8 from which the encoding is guessed


@dataclass(frozen=True)
class _Compression:
    name: str
    beginning: bytes  # as a pattern
    open: Callable[[Path], Any]


def _open_zstd(path: Path) -> io.BufferedReader:
    import pyarrow  # type: ignore[import-untyped]

    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))


_COMPRESSIONS = {
    ".gz": _Compression("gzip", rb"\x1f\x8b", gzip.open),
    ".xz": _Compression("xz", rb"\xfd7zXZ\0", lzma.open),
    ".zst": _Compression("zstd", rb"\x28\xb5\x2f\xfd", _open_zstd),
    ".bz2": _Compression("bzip2", rb"BZh[1-9]1AY&SY", bz2.open),
}

# Beginnings of files without text, or with text in an unsupported format.
_NO_TEXT = {
    rb"%PDF-": "a PDF file: extract its text",
    rb"PK\x03\x04": "a ZIP archive, possibly an office document or e-book: unpack or export it",
    rb"\xd0\xcf\x11\xe0": "an office document: save it as text",
    rb"\{\\rtf": "an RTF document: save it as text",
    rb"7z\xbc\xaf": "a 7z archive: unpack it",
    rb"Rar!\x1a": "a RAR archive: unpack it",
    rb"[\s\S]{257}ustar": "a tar archive: unpack it, and give the folder",
    rb"\x04\x22\x4d\x18": "compressed with lz4: decompress it",
    rb"\x1f\x9d": "compressed with compress: decompress it",
    rb"\x89PNG|\xff\xd8\xff|GIF8[79]a": "an image",
    rb"\x7fELF": "a program",
    rb"SQLite format 3\0": "an SQLite database: write its text as JSON lines",
    rb"\x93NUMPY": "a numpy array",
    rb"ARROW1\0": "an Arrow file: write it as Parquet",
    rb"Obj\x01": "an Avro file: write it as Parquet",
    rb"\x89HDF": "an HDF5 file: write its text as JSON lines",
}
_JSON_LINE = rb'\s*\{\s*"[^"\n]*"\s*:'

_UTF8 = "only UTF-8 is supported: convert it, for example with `iconv -f {encoding} -t UTF-8`"
_BYTE_ORDER_MARKS = {  # longer ones first: that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def kind_of(path: Path) -> FileKind:
    """Return the kind of a file by its name, without the suffix of its compression; text if unknown."""
    return _KINDS.get(_inner_suffix(path), "text")


def is_named(path: Path) -> bool:
    """Whether a file in a folder is read, by its name.

    An uncompressed .json is not: it is most often a configuration.
    """
    return _inner_suffix(path) in _KINDS and path.suffix.lower() != ".json"


def named_kinds() -> str:
    """Return the supported suffixes, for messages."""
    return f"{', '.join(_KINDS)}, also compressed ({', '.join(_COMPRESSIONS)})"


def is_compressed(path: Path) -> bool:
    """Whether a file is compressed, by its name."""
    return path.suffix.lower() in _COMPRESSIONS


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed content."""
    compression = _COMPRESSIONS.get(path.suffix.lower())
    return cast(BinaryIO, path.open("rb") if compression is None else compression.open(path))


@contextmanager
def naming_damaged_files(path: Path) -> Iterator[None]:
    """Convert the errors of all compressions to one that names the file."""
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(
            f"{path} could not be read ({error}); if it is damaged or truncated, create or download it again"
        ) from error


def check_beginning(path: Path) -> None:
    """Raise ValueError if the first bytes of a file contradict its name, or are not text."""
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    for suffix, compression in _COMPRESSIONS.items():
        is_compressed, is_named_so = re.match(compression.beginning, beginning), path.suffix.lower() == suffix
        if is_named_so and not is_compressed:
            raise ValueError(
                f"{path} is named {suffix} but is not compressed with {compression.name}: rename it"
            )
        if is_compressed and not is_named_so:
            raise ValueError(
                f"{path} is compressed with {compression.name}: rename it to {path.name}{suffix}"
            )
    with naming_damaged_files(path), open_decompressed(path) as decompressed:
        beginning = decompressed.read(_BEGINNING)
    is_parquet, is_named_so = beginning.startswith(_PARQUET), kind_of(path) == "Parquet"
    if is_parquet != is_named_so:
        raise ValueError(
            f"{path} is named as Parquet, but begins with {beginning[:4]!r} and not {_PARQUET!r}: rename it"
            if is_named_so
            else f"{path} is a Parquet file: rename it to {path.stem}.parquet"
        )
    for pattern, meaning in _NO_TEXT.items():
        if re.match(pattern, beginning):
            raise ValueError(
                f"{path} is {meaning}. Supported are UTF-8 text, JSON lines and Parquet: {named_kinds()}"
            )
    if _inner_suffix(path) not in _KINDS and re.match(_JSON_LINE, beginning):
        raise ValueError(
            f"{path} looks like JSON: name it .jsonl if each line is a document, or .txt to read it as text"
        )
    if not is_parquet and (encoding := _wide_encoding(beginning)) is not None:
        raise ValueError(f"{path} is {encoding} text; {_UTF8.format(encoding=encoding)}")


def not_utf8(origin: str, text: bytes, error: UnicodeDecodeError) -> ValueError:
    """Return an error about text that is not UTF-8."""
    import charset_normalizer

    guess = charset_normalizer.from_bytes(text[max(0, error.start - _SAMPLE) : error.start + _SAMPLE]).best()
    surroundings = text[max(0, error.start - 20) : error.end + 20]
    looks_like = "" if guess is None else f"; it may be {guess.encoding}"
    way_out = _UTF8.format(encoding="ENCODING" if guess is None else guess.encoding)
    return ValueError(
        f"{origin} is not UTF-8 text ({error.reason}) near {surroundings!r}{looks_like}. With this tokenizer "
        f"{way_out}; or use the tokenizer 'bytes', which accepts any encoding"
    )


def _inner_suffix(path: Path) -> str:
    return Path(path.stem if is_compressed(path) else path.name).suffix.lower()


def _wide_encoding(beginning: bytes) -> str | None:
    """Detect UTF-16 or UTF-32 by the byte order mark or by the zeros between Latin letters."""
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
