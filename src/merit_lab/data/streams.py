"""Corpora from the Hugging Face hub, streamed document by document: OpenWebText and C4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from merit_lab.checks import check_at_least
from merit_lab.data.pieces import TextPiece

# nanoGPT splits by datasets' train_test_split(test_size=0.0005, seed=2357, shuffle=True).
_NANOGPT_SHARE, _NANOGPT_SEED = 0.0005, 2357
OPENWEBTEXT_DOCUMENTS = 8_013_769

Load = Callable[..., Any]  # datasets.load_dataset, or its replacement in a test


@dataclass(frozen=True, kw_only=True)
class Section:
    """The first documents of one split on the hub, and which file each goes to."""

    hub_split: str
    num_documents: int
    destination: Callable[[int], str]


class Stream:
    """Documents of some sections of a dataset on the hub, one section after the other.

    Resuming uses the position that the datasets library keeps, so only the current file is downloaded again.
    """

    splits: tuple[str, ...] = ("train", "val")
    unit = "documents"

    def __init__(
        self,
        recipe: Mapping[str, Any],
        dataset: Mapping[str, Any],
        sections: list[Section],
        load: Load | None,
    ) -> None:
        for section in sections:
            check_at_least(f"the number of {section.hub_split} documents", section.num_documents, 1)
        self.recipe = {**recipe, "dataset": dict(dataset)}
        self.total = sum(section.num_documents for section in sections)
        self._dataset = dataset
        self._sections = sections
        self._load = load or _hub_loader(str(recipe["name"]))
        self._place: tuple[int, int, Any] = (0, 0, None)

    def state(self) -> dict[str, Any]:
        """Return the section, the number of its documents yielded, and the library's position in it."""
        section, num_documents, stream = self._place
        return {
            "section": section,
            "documents": num_documents,
            "stream": None if stream is None else stream.state_dict(),
        }

    def pieces(self, state: Any = None) -> Iterator[TextPiece]:
        """Yield all documents, or those after a state."""
        start = state or {"section": 0, "documents": 0, "stream": None}
        for number in range(start["section"], len(self._sections)):
            section = self._sections[number]
            stream = self._load(**self._dataset, split=section.hub_split, streaming=True)
            document = 0
            if number == start["section"] and start["stream"] is not None:
                stream.load_state_dict(start["stream"])
                document = start["documents"]
            if document < section.num_documents:
                for row in stream:
                    document += 1
                    self._place = (number, document, stream)
                    yield TextPiece(
                        split=section.destination(document - 1),
                        text=row["text"].encode(),
                        ends=True,
                        origin=f"{self.recipe['name']}, {section.hub_split} document {document - 1}",
                    )
                    if document == section.num_documents:
                        break
            if document != section.num_documents:
                raise ValueError(
                    f"{self.recipe['name']}: {section.hub_split} ended after {document} documents; "
                    f"{section.num_documents} were expected: request fewer, or the hub's copy has changed"
                )


def openwebtext(num_documents: int | None, load: Load | None = None) -> Stream:
    """OpenWebText with nanoGPT's validation documents.

    nanoGPT permutes all documents and uses the first 0.05% of them for validation. The same permutation is
    drawn here, and the same documents are used for validation; only the order within the files differs
    (theirs is permuted, ours that of the dataset), which does not matter to batches that are drawn without
    replacement. nanoGPT's files of all documents have 9,035,582,198 and 4,434,897 tokens.
    """
    num_documents = OPENWEBTEXT_DOCUMENTS if num_documents is None else num_documents
    validation = nanogpt_validation(OPENWEBTEXT_DOCUMENTS)
    if num_documents <= min(validation):
        raise ValueError(
            f"the first {num_documents} documents of OpenWebText include none of nanoGPT's validation set: "
            f"request more than {min(validation)}"
        )
    recipe = {"name": "openwebtext", "num_documents": num_documents, "validation": "as nanoGPT"}
    section = Section(
        hub_split="train",
        num_documents=num_documents,
        destination=lambda document: "val" if document in validation else "train",
    )
    return Stream(recipe, {"path": "Skylion007/openwebtext"}, [section], load)


def c4(train_documents: int, validation_documents: int, load: Load | None = None) -> Stream:
    """Return the first documents of English C4's training and validation sets."""
    sections = [
        Section(hub_split="validation", num_documents=validation_documents, destination=lambda _: "val"),
        Section(hub_split="train", num_documents=train_documents, destination=lambda _: "train"),
    ]
    recipe = {
        "name": "c4",
        "train_documents": train_documents,
        "validation_documents": validation_documents,
    }
    return Stream(recipe, {"path": "allenai/c4", "name": "en"}, sections, load)


def nanogpt_validation(num_documents: int) -> frozenset[int]:
    """Return the documents in nanoGPT's validation set, out of ``num_documents``."""
    permuted = np.random.default_rng(_NANOGPT_SEED).permutation(num_documents)
    return frozenset(permuted[: math.ceil(_NANOGPT_SHARE * num_documents)].tolist())


def _hub_loader(name: str) -> Load:
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"{name} needs the package datasets, which is not installed: pip install 'merit-optim[eval]'"
        ) from error
    load: Load = datasets.load_dataset
    return load
