"""Corpora: which text goes to which file. Files of the user, installed Python sources, enwik8, the hub."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import math
import os
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.data.read import NAMES, PIECE_BYTES, Layout, cut, find_files, has_line, nearest_cut, texts
from merit_lab.data.tokens import hash_file
from merit_lab.progress import WorkProgress

_TEST_FOLDERS = {"test", "tests", "idle_test"}
# nanoGPT splits by datasets' train_test_split(test_size=0.0005, seed=2357, shuffle=True).
_NANOGPT_SHARE, _NANOGPT_SEED = 0.0005, 2357
OPENWEBTEXT_DOCUMENTS = 8_013_769

Load = Callable[..., Any]  # datasets.load_dataset, or its replacement in a test


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Some text for one split: whether its document ends with it, and where it comes from."""

    split: str
    text: bytes
    ends: bool
    origin: str


class Corpus:
    """Text in a fixed order, with a position from which an iteration can continue.

    ``recipe`` is everything that determines the text and its order, as JSON; ``splits`` are the files to
    write; ``total`` is the number of bytes or documents, whichever ``unit`` names.
    """

    recipe: dict[str, Any]
    splits: tuple[str, ...] = ("train", "val")
    total: int
    unit: Literal["bytes", "documents"] = "bytes"
    _position = 0

    def pieces(self, state: Any = None) -> Iterator[Piece]:
        """Yield all pieces, or those after a state of an earlier iteration."""
        self._position = 0
        for piece in self._all_pieces():
            self._position += 1
            if self._position > (state or 0):
                yield piece

    def state(self) -> Any:
        """Return the position of the latest iteration, as JSON: here the number of pieces yielded."""
        return self._position

    def _all_pieces(self) -> Iterator[Piece]:
        raise NotImplementedError


class TextFiles(Corpus):
    """The documents of files, in order, with a share of their text for validation: whole documents.

    They are taken in the order of their hashes, each that brings the validation text closer to the share. So
    the choice does not depend on the order of the documents, and equal documents are on the same side. Of a
    single document the end is for validation.

    The files are read once for the hashes, before anything is tokenized.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        validation: float,
        layout: Layout | None = None,
        progress: WorkProgress | None = None,
    ) -> None:
        if not 0 < validation < 1:
            raise ValueError(
                f"the share for validation is {validation}; it must be between 0 and 1, for example 0.01"
            )
        self._paths, self._layout = paths, layout or Layout()
        self._hashes = array("Q")
        sizes = array("Q")
        content = hashlib.sha256()
        self.total = 0
        progress = progress or WorkProgress(Console(quiet=True))
        with progress.piece("reading", None, "bytes of text"):
            for _, _, text, ends, document, size in self._texts():
                content.update(text)
                self.total += len(text)
                progress.update(self.total)
                if ends:
                    content.update(b"\0end of file\0")
                    self._hashes.append(document)
                    sizes.append(size)
        if not self._hashes:
            raise ValueError("the files have no text; give other files")
        separator = self._layout.separator
        if separator is not None and not any(has_line(path, separator) for path in paths):
            raise ValueError(
                f"the separator is {separator!r}, but no text file has such a line; give the line as "
                "it is in the text, or leave --separator out"
            )
        # A single document is divided at the good place nearest to this offset.
        self._cut_at = self.total * (1 - validation) if len(self._hashes) == 1 else None
        self._chosen: frozenset[int] = frozenset()
        if self._cut_at is None:
            self._chosen = _chosen(np.array(self._hashes), np.array(sizes), self.total * validation)
        self.recipe = {
            "name": name,
            "sha256": content.hexdigest(),
            "num_files": len(paths),
            "split": "documents" if self._cut_at is None else "end",
            "validation": validation,
        }

    def _all_pieces(self) -> Iterator[Piece]:
        hashes = iter(self._hashes)
        following = next(hashes, None)
        for path, origin, text, ends, document, size in self._texts():
            if following is None or (ends and document != following):
                raise _changed(path)
            for split, part in self._parts(text, size - len(text), following):
                is_last = ends and (self._cut_at is None or split == "val")
                yield Piece(split=split, text=part, ends=is_last, origin=origin)
            if ends:
                following = next(hashes, None)
        if following is not None:
            raise _changed(self._paths[-1])

    def _parts(self, text: bytes, begin: int, document: int) -> list[tuple[str, bytes]]:
        """Return a piece as it is divided: one part, or two of the single document's piece with its cut."""
        if self._cut_at is None:
            return [("val" if document in self._chosen else "train", text)]
        if not begin <= self._cut_at < begin + len(text):
            return [("train" if begin < self._cut_at else "val", text)]
        place = nearest_cut(text, self._cut_at - begin)
        if place is None and begin == 0:
            raise ValueError(
                f"the text is one document of {self.total} bytes without a place to cut off its end for "
                "validation: a space or a newline after a visible character. Add some, or give more documents"
            )
        place = place or 0
        return [(split, part) for split, part in (("train", text[:place]), ("val", text[place:])) if part]

    def _texts(self) -> Iterator[tuple[Path, str, bytes, bool, int, int]]:
        """Yield what `texts` does of each file, with hash and size of the document up to there."""
        for path in self._paths:
            digest, size = hashlib.blake2b(digest_size=8), 0
            for origin, text, ends in texts(path, self._layout):
                digest.update(text)
                size += len(text)
                yield path, origin, text, ends, int.from_bytes(digest.digest(), "little"), size
                if ends:
                    digest, size = hashlib.blake2b(digest_size=8), 0


def _chosen(hashes: NDArray[np.uint64], sizes: NDArray[np.uint64], wanted: float) -> frozenset[int]:
    """Return the hashes of the documents for validation, of about ``wanted`` bytes."""
    unique, inverse = np.unique(hashes, return_inverse=True)
    if len(unique) == 1:
        raise ValueError(
            f"all {len(hashes)} documents are identical, so none is left for validation: give other text"
        )
    amounts = np.bincount(inverse, weights=sizes)  # equal documents go together
    chosen, missing, smallest = [], wanted, amounts.min()
    for value, amount in zip(unique.tolist(), amounts.tolist(), strict=True):
        if amount < 2 * missing:
            chosen.append(value)
            missing -= amount
        elif smallest >= 2 * missing:
            break
    if not chosen:
        chosen = [int(unique[amounts.argmin()])]
    if len(chosen) == len(unique):
        raise ValueError(
            "the share for validation takes all documents and leaves nothing to train on: choose a smaller "
            "one, or give more documents"
        )
    return frozenset(chosen)


def _changed(path: Path) -> ValueError:
    return ValueError(f"{path} changed while it was being read: start again when nothing writes to it")


def text_files(
    paths: Sequence[Path],
    validation: float,
    layout: Layout | None = None,
    progress: WorkProgress | None = None,
) -> TextFiles:
    """Return the text of the user's files and folders."""
    files, skipped = find_files(paths)
    if skipped and progress is not None:
        progress.say(
            f"skipping {len(skipped)} files, such as {skipped[0]}, whose names do not end with one of "
            f"{NAMES}. To read them, name them explicitly"
        )
    return TextFiles("text", files, validation, layout, progress)


def demo(validation: float) -> TextFiles:
    """Return the Python files of merit-optim (src and tests/optim of commit 3198712), shipped with it."""
    return TextFiles("demo", [Path(__file__).with_name("demo.jsonl.xz")], validation)


def embedded(limit: int, validation: float) -> TextFiles:
    """Return the Python sources of the running interpreter: a corpus that every machine has.

    The standard library comes first, in the order of its paths, then the installed packages in the order of
    their paths' hashes, so that a limit takes some of every package and not all of the first. Tests, empty
    files and files that are not UTF-8 are left out. It ends before the file that exceeds ``limit`` bytes.
    """
    check_at_least("limit", limit, 1)
    folders = sysconfig.get_paths()
    packages = Path(folders["purelib"])

    def place(path: Path) -> bytes:  # relative, so that the corpus does not depend on the environment's place
        return hashlib.blake2b(path.relative_to(packages).as_posix().encode(), digest_size=8).digest()[::-1]

    paths, num_bytes = [], 0
    for path in [*sorted(_sources(Path(folders["stdlib"]))), *sorted(_sources(packages), key=place)]:
        text = path.read_bytes()
        if num_bytes + len(text) > limit:
            break
        with contextlib.suppress(UnicodeDecodeError):
            if text.decode():
                paths.append(path)
                num_bytes += len(text)
    if not paths:
        raise ValueError(
            f"no Python sources of up to {limit} bytes are installed with {sys.executable}: raise the limit, "
            "or use `merit prepare text` with your own files"
        )
    return TextFiles("embedded", paths, validation)


def _sources(folder: Path) -> Iterator[Path]:
    """Yield Python files below a folder, except those of tests and of packages installed inside it."""
    skipped = _TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            if name.endswith(".py") and (path := Path(parent, name)).is_file():  # not a broken link
                yield path


class Enwik8(Corpus):
    """The first 10^8 bytes of an English Wikipedia dump, split as usual: 90, 5 and 5 million bytes."""

    splits = ("train", "val", "test")

    def __init__(self, path: Path, sizes: tuple[int, int, int] = (90_000_000, 5_000_000, 5_000_000)) -> None:
        self.total = sum(sizes)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if path.stat().st_size != self.total:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes; enwik8 has {self.total}. Give the unzipped file, "
                "or use `merit prepare text` for other text"
            )
        self._path, self._sizes = path, sizes
        self.recipe = {"name": "enwik8", "sha256": hash_file(path), "sizes": list(sizes)}

    def _all_pieces(self) -> Iterator[Piece]:
        with self._path.open("rb") as file:
            for split, left in zip(self.splits, self._sizes, strict=True):
                for text in cut(io.BytesIO(file.read(left)), PIECE_BYTES):
                    left -= len(text)
                    yield Piece(split=split, text=text, ends=left == 0, origin=str(self._path))


class Section(NamedTuple):
    """The first documents of one split on the hub, and which of them are for validation."""

    hub_split: str
    num_documents: int
    is_validation: Callable[[int], bool]


class Hub(Corpus):
    """Documents of some sections of a dataset on the hub, streamed one section after the other.

    The datasets library keeps the position, so that after an interruption only the current file is
    downloaded again.
    """

    unit = "documents"

    def __init__(
        self,
        name: str,
        counts: Mapping[str, Any],
        dataset: Mapping[str, Any],
        sections: list[Section],
        load: Load | None,
    ) -> None:
        for section in sections:
            check_at_least(f"the number of {section.hub_split} documents", section.num_documents, 1)
        self.recipe = {"name": name, **counts, "dataset": dataset}
        self.total = sum(section.num_documents for section in sections)
        self._dataset, self._sections = dataset, sections
        self._load = load or _hub_loader(name)
        self._place: tuple[int, int, Any] = (0, 0, None)

    def state(self) -> dict[str, Any]:
        """Return the section, the number of its documents yielded, and the library's position in it."""
        section, num_documents, stream = self._place
        return {"section": section, "documents": num_documents, "stream": stream and stream.state_dict()}

    def pieces(self, state: Any = None) -> Iterator[Piece]:
        """Yield all documents, or those after a state."""
        first, done, position = (
            (state["section"], state["documents"], state["stream"]) if state else (0, 0, 0)
        )
        for number, (hub_split, wanted, is_validation) in enumerate(self._sections[first:], first):
            stream = self._load(**self._dataset, split=hub_split, streaming=True)
            if position:
                stream.load_state_dict(position)
            for row in itertools.islice(stream, wanted - done):
                origin = f"{self.recipe['name']}, {hub_split} document {done}"
                split = "val" if is_validation(done) else "train"
                done += 1
                self._place = (number, done, stream)
                yield Piece(split=split, text=row["text"].encode(), ends=True, origin=origin)
            if done != wanted:
                raise ValueError(
                    f"{self.recipe['name']}: {hub_split} ended after {done} documents; {wanted} were "
                    "expected: request fewer, or the hub's copy has changed"
                )
            done, position = 0, None


def openwebtext(num_documents: int | None, load: Load | None = None) -> Hub:
    """Return OpenWebText with nanoGPT's validation documents.

    nanoGPT permutes all documents and uses the first 0.05% of them for validation. The same permutation is
    drawn here; only the order within the files differs (theirs is permuted, ours that of the dataset), which
    does not matter to batches that are drawn without replacement. nanoGPT's files of all documents have
    9,035,582,198 and 4,434,897 tokens.
    """
    num_documents = OPENWEBTEXT_DOCUMENTS if num_documents is None else num_documents
    validation = nanogpt_validation(OPENWEBTEXT_DOCUMENTS)
    if num_documents <= min(validation):
        raise ValueError(
            f"the first {num_documents} documents of OpenWebText include none of nanoGPT's validation set: "
            f"request more than {min(validation)}"
        )
    section = Section("train", num_documents, validation.__contains__)
    counts = {"num_documents": num_documents, "validation": "as nanoGPT"}
    return Hub("openwebtext", counts, {"path": "Skylion007/openwebtext"}, [section], load)


def c4(train_documents: int, validation_documents: int, load: Load | None = None) -> Hub:
    """Return the first documents of English C4's training and validation sets."""
    sections = [
        Section("validation", validation_documents, lambda _: True),
        Section("train", train_documents, lambda _: False),
    ]
    counts = {"train_documents": train_documents, "validation_documents": validation_documents}
    return Hub("c4", counts, {"path": "allenai/c4", "name": "en"}, sections, load)


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
