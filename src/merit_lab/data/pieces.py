"""Text in pieces of bounded size, cut where no tokenizer notices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

# Between a visible ASCII character and a blank or a new line: GPT-2's splitting pattern, which our own
# BPE uses too, never joins the two, and no UTF-8 character is cut.
_CUT = re.compile(rb"[!-~](?=[ \n])")
# The same after any character but white space, for text that has hardly any ASCII.
_CUT_ANY = re.compile(
    rb"(?:[!-~]|[\x80-\xbf](?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80))(?=[ \n])"
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


def cut(file: BinaryIO, size: int) -> Iterator[bytes]:
    """A file in pieces that are cut at the first good place after ``size`` bytes each.

    Tokenizing the pieces one by one gives the tokens of the whole. Where there is no good place, a piece
    is as long as it must be.
    """
    rest = b""
    # Reading as much again as is at hand keeps the time linear where no cut is found for long.
    while block := file.read(max(size, len(rest))):
        rest += block
        while place := _place(rest, size):
            yield rest[: place.end()]
            rest = rest[place.end() :]
    if rest:
        yield rest


def _place(text: bytes, size: int) -> re.Match[bytes] | None:
    place = _CUT.search(text, size, _FAR * size)
    if place is None and len(text) >= _FAR * size:
        place = _CUT_ANY.search(text, size)
    return place
