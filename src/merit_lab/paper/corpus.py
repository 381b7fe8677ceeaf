"""The identity of the data that runs were trained on, stored beside them for when the data are gone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merit_lab.data import Dataset
from merit_lab.runs import durable

_NAME = "data.json"


class CorpusIdentity(Protocol):
    """The properties of the data that determine a run directory's name. A ``Dataset`` has them."""

    @property
    def folder(self) -> Path: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class KnownCorpus:
    """Data known only by name and fingerprint."""

    folder: Path
    vocab_size: int | None
    fingerprint: str


def remember(dataset: Dataset, folder: Path) -> None:
    """Write the identity of the data into a folder of runs."""
    known = {
        "name": dataset.folder.resolve().name,
        "tokenizer": dataset.tokenizer,
        "vocab_size": dataset.vocab_size,
        "fingerprint": dataset.fingerprint,
    }
    folder.mkdir(parents=True, exist_ok=True)
    durable.write(folder / _NAME, json.dumps(known, indent=2) + "\n")


def recall(folder: Path) -> KnownCorpus | None:
    """Read what ``remember`` wrote into the folder; None if there is nothing."""
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return KnownCorpus(Path(known["name"]), known["vocab_size"], known["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}); remove it and name the data of the runs with --data"
        ) from error
