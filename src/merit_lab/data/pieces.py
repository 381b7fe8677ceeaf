"""Cut text into pieces of bounded size at places that do not change its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# A space or a newline after a visible ASCII character: GPT-2's splitting pattern, which our BPE uses too,
# never joins the two, and no UTF-8 character is cut. The space comes first in the patterns, with a lookbehind
# for the character before it, so that text without spaces is skipped at the speed of a scan.
_CUT = re.compile(rb"[ \n](?<=[!-~][ \n])")
# The same after any character except white space, for text with hardly any ASCII.
_CUT_ANY = re.compile(
    rb"[ \n](?<=[!-~\x80-\xbf][ \n])(?<!\xc2[\x85\xa0][ \n])(?<!\xe1\x9a\x80[ \n])"
    rb"(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf][ \n])(?<!\xe2\x81\x9f[ \n])(?<!\xe3\x80\x80[ \n])"
)
_FAR = 4  # times the wanted size: if there is no ASCII up to here, any character will do


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """Some text for one split: whether the document ends here, and where it comes from."""

    split: str
    text: bytes
    ends: bool
    origin: str


class TextCorpus(Protocol):
    """Text in a fixed order, with a position from which an iteration can continue."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Everything that determines the text and its order, as JSON."""
        ...

    @property
    def splits(self) -> tuple[str, ...]:
        """The files to write: "train" and "val", and others."""
        ...

    @property
    def total(self) -> int:
        """The number of bytes or documents; see ``unit``."""
        ...

    @property
    def unit(self) -> str:
        """What ``total`` counts: "bytes" or "documents"."""
        ...

    def pieces(self, state: Any = None) -> Iterator[TextPiece]:
        """Yield all pieces, or those after a state of an earlier iteration."""
        ...

    def state(self) -> Any:
        """Return the position of the latest iteration, after its last piece, as JSON."""
        ...


class Readable(Protocol):
    """A source of bytes."""

    def read(self, size: int, /) -> bytes:
        """Read about ``size`` bytes, or none at the end."""
        ...


def cut(file: Readable, size: int) -> Iterator[bytes]:
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
        while (place := _place(text, begin, size, searched)) is not None:
            yield text[begin:place]
            begin = searched = place
        searched = len(text) if len(text) - begin >= _FAR * size else begin
    if text[begin:]:
        yield text[begin:]


def _place(text: bytes, begin: int, size: int, searched: int) -> int | None:
    """Return where to end the piece that begins at ``begin``; None if more text is needed."""
    first, far = begin + size + 1, begin + _FAR * size
    match = _CUT.search(text, max(first, searched), far)
    if match is None and len(text) >= far:
        match = _CUT_ANY.search(text, max(first, searched))
    return None if match is None else match.start()
