"""All entries by name, in the paper's order."""

from __future__ import annotations

from collections.abc import Sequence

from merit_lab.paper.entries import (
    batches,
    curvature,
    evaluation,
    horizon,
    logits,
    losses,
    rates,
    retuned,
    speed,
    theorem,
    updates,
    variants,
    weights,
)
from merit_lab.paper.entry import PaperEntry
from merit_optim.spelling import did_you_mean

_ORDER = (
    *(f"fig{number}" for number in range(1, 16)),
    *(f"table{number}" for number in range(1, 5)),
    "theorem1",
    "llama-rates",
    "reference",
    "horizon",
    "doubled",
    "variants",
    "norm",
    "logits",
    "reach",
    "warmup",
    "width",
)
_MODULES = (
    batches,
    curvature,
    evaluation,
    horizon,
    logits,
    losses,
    rates,
    retuned,
    speed,
    theorem,
    updates,
    variants,
    weights,
)
_ALL = {entry.name: entry for module in _MODULES for entry in module.ENTRIES}

ENTRIES: dict[str, PaperEntry] = {name: _ALL[name] for name in sorted(_ALL, key=_ORDER.index)}


def choose(names: Sequence[str]) -> list[PaperEntry]:
    """The entries with these names, in the paper's order; "all" selects every entry."""
    for name in names:
        if name != "all" and name not in ENTRIES:
            hint = did_you_mean(name, ENTRIES, otherwise=";")
            raise ValueError(f"unknown entry {name!r}{hint} there are: all, {', '.join(ENTRIES)}")
    return [entry for name, entry in ENTRIES.items() if name in names or "all" in names]
