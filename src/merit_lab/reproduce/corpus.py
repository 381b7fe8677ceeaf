"""What data runs are of, kept beside them: enough to know the runs again where the data are not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from merit_lab.data import Dataset
from merit_lab.record import durable

_NAME = "data.json"


class Corpus(Protocol):
    """What a run's directory is named by, of its data. A ``Dataset`` is one."""

    @property
    def folder(self) -> Path: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class KnownCorpus:
    """Data that are known by name and fingerprint alone."""

    folder: Path
    vocab_size: int | None
    fingerprint: str


def remember(dataset: Dataset, folder: Path) -> None:
    """Note in a folder of runs what data they are of."""
    known = {
        "name": dataset.folder.resolve().name,
        "tokenizer": dataset.tokenizer,
        "vocab_size": dataset.vocab_size,
        "fingerprint": dataset.fingerprint,
    }
    folder.mkdir(parents=True, exist_ok=True)
    durable.write(folder / _NAME, json.dumps(known, indent=2) + "\n")


def recall(folder: Path) -> KnownCorpus | None:
    """What ``remember`` noted there; None where it did not."""
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
