"""Text in pieces of bounded size, cut where no tokenizer notices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# A blank or a new line after a visible ASCII character: GPT-2's splitting pattern, which our own BPE uses
# too, never joins the two, and no UTF-8 character is cut. The blank comes first in the patterns, and what
# stands before it is looked back at, so that text without blanks is passed over at the speed of a scan.
_CUT = re.compile(rb"[ \n](?<=[!-~][ \n])")
# The same after any character but white space, for text that has hardly any ASCII.
_CUT_ANY = re.compile(
    rb"[ \n](?<=[!-~\x80-\xbf][ \n])(?<!\xc2[\x85\xa0][ \n])(?<!\xe1\x9a\x80[ \n])"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf][ \n])(?<!\xe2\x81\x9f[ \n])(?<!\xe3\x80\x80[ \n])"
)
_FAR = 4  # times the wanted size: without ASCII up to here, any character will do


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some text for one of the files: its split, whether the text ends here, and where it comes from."""

    split: str
    text: bytes
    ends: bool
    origin: str


class Corpus(Protocol):
    """Text in a fixed order, and where an iteration over it stands."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """What the text and its order follow from, as JSON."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The files to write: "train" and "val", and others."""
        ...

    @property
    def total(self) -> int:
        """How many bytes or documents there are, as ``unit`` says."""
        ...

    @property
    def unit(self) -> str:
        """What ``total`` counts: "bytes" or "documents"."""
        ...

    def pieces(self, state: Any = None) -> Iterator[Piece]:
        """All pieces, or those after a state that an earlier iteration gave."""
        ...

    def state(self) -> Any:
        """Where the latest iteration stands, after the piece it yielded last, as JSON."""
        ...


class Readable(Protocol):
    """What text is read from."""

    def read(self, size: int, /) -> bytes:
        """About so many bytes, or none at the end."""
        ...


def cut(file: Readable, size: int) -> Iterator[bytes]:
    """A file in pieces that are cut at the first good place after ``size`` bytes each.

    Tokenizing the pieces one by one gives the tokens of the whole. Where there is no good place, a piece
    is as long as it must be.
    """
    text, begin = b"", 0  # what is at hand, and where the next piece begins in it
    searched = 0  # up to here there is no good place: it is not looked at again when more is read
    # Reading as much again as is at hand keeps the time linear where no cut is found for long.
    while block := file.read(max(size, len(text) - begin)):
        searched -= begin
        text, begin = text[begin:] + block, 0
        while (place := _place(text, begin, size, searched)) is not None:
            yield text[begin:place]
            begin = searched = place
        searched = len(text) if len(text) - begin >= _FAR * size else begin
    if text[begin:]:
        yield text[begin:]


def _place(text: bytes, begin: int, size: int, searched: int) -> int | None:
    """Where to end the piece that begins at ``begin``; None where more text is needed to tell."""
    first, far = begin + size + 1, begin + _FAR * size
    found = _CUT.search(text, max(first, searched), far)
    if found is None and len(text) >= far:
        found = _CUT_ANY.search(text, max(first, searched))
    return None if found is None else found.start()
