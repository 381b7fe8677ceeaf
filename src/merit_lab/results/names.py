"""Names for readers: of optimizers, and of whatever users may have named."""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable

# In display order. Others follow, under the names of their classes.
DISPLAY_NAMES = {
    "adamw": "AdamW",
    "lamb-uncorrected": "LAMB",  # the MERIT paper's, as in the records under results/
    "lamb": "LAMB corrected",
    "maxlamb": "MaxLAMB",
    "merit": "MERIT",
    "lion": "Lion",
    "sophiag": "SophiaG",
    "soap": "SOAP",
    "soap-merit": "SOAPMERIT",
    "orscale": "OrScale",
    "muon": "Muon",
    "normuon": "NorMuon",
    "muon-merit": "MuonMERIT",
    "muon-sphere": "MuonSphere",
    "normuon-sphere": "NorMuonSphere",
    "muown": "Muown",
    "soap-muon": "SOAPMuon",
}

LONGEST = 100  # characters of a name on a page
_HASH_DIGITS = 8
# Control, format, surrogate and unassigned characters, among them U+FFFF, and the ends of lines: they end
# the program that draws charts, break tables, or hide what a name is.
_UNREADABLE = {"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"}


def short_name(optimizer: str) -> str:
    """An optimizer's name; for MODULE:CLASS, the class."""
    return optimizer.rpartition(":")[2]


def display_name(optimizer: str) -> str:
    """An optimizer's name for readers.

    Example:
        >>> display_name("muon-merit"), display_name("torch.optim:SGD")
        ('MuonMERIT', 'SGD')
    """
    return DISPLAY_NAMES.get(optimizer, clean(short_name(optimizer)))


def display_names(optimizers: Iterable[str]) -> dict[str, str]:
    """The names of several optimizers; MODULE:CLASS where the class alone is that of several."""
    short = {optimizer: display_name(optimizer) for optimizer in optimizers}
    taken = Counter(short.values())
    return {
        optimizer: clean(optimizer) if taken[name] > 1 and optimizer not in DISPLAY_NAMES else name
        for optimizer, name in short.items()
    }


def place(optimizer: str) -> tuple[int, str]:
    """What to sort optimizers by for display."""
    known = list(DISPLAY_NAMES)
    return (known.index(optimizer) if optimizer in known else len(known), optimizer)


def clean(text: str, longest: int = LONGEST) -> str:
    """Text on one line of readable characters; what had to be changed or cut ends in digits of its hash.

    So names that differ stay different.

    Example:
        >>> clean("a\\x07b"), clean("x" * 50, longest=20)
        ('a\N{REPLACEMENT CHARACTER}b eaef512b', 'xxxxxxxxxx… 77cf1206')
    """
    line = readable(" ".join(text.split()))
    if line == text and len(line) <= longest:
        return line
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    room = longest - _HASH_DIGITS - 2
    return f"{line} {digest}" if len(line) <= room else f"{line[:room]}… {digest}"


def readable(text: str) -> str:
    """Text with the sign for an unknown character in place of each unreadable one but line breaks."""
    return "".join(
        one if one == "\n" or unicodedata.category(one) not in _UNREADABLE else "\N{REPLACEMENT CHARACTER}"
        for one in text
    )
