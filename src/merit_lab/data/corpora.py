"""Corpora: which text goes to which file. Files of the user, installed Python sources, enwik8, the hub."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from merit_lab.checks import check_at_least
from merit_lab.data.read import (
    NAMES,
    PIECE_BYTES,
    cut,
    files_below,
    find_files,
    has_line,
    nearest_cut,
    texts,
)
from merit_lab.data.tokens import hash_file
from merit_lab.progress import WorkProgress

# Of the interpreter's sources: tests, and packages, which are read after the library that they lie in.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# nanoGPT splits by datasets' train_test_split(test_size=0.0005, seed=2357, shuffle=True).
_NANOGPT_SHARE, _NANOGPT_SEED = 0.0005, 2357
OPENWEBTEXT_DOCUMENTS = 8_013_769


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
    write; ``total`` is the number of bytes or documents, whichever ``unit`` names; ``begin`` is the position
    before all text.
    """

    recipe: dict[str, Any]
    splits: tuple[str, ...] = ("train", "val")
    total: int
    unit: Literal["bytes", "documents"] = "bytes"
    begin: Any = 0
    _num_pieces = 0

    def pieces(self, position: Any) -> Iterator[Piece]:
        """Yield the pieces after a position."""
        for number, piece in enumerate(self._all_pieces(), 1):
            self._num_pieces = number
            if number > position:
                yield piece

    def position(self) -> Any:
        """Return the position of the latest iteration, as JSON: here the number of pieces yielded."""
        return self._num_pieces

    def _all_pieces(self) -> Iterator[Piece]:
        raise NotImplementedError


class _Text(NamedTuple):
    """A piece of a document, with size and hash of the document up to its end."""

    path: Path
    origin: str
    text: bytes
    ends: bool
    size: int
    hash: int


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
        *,
        field: str = "text",
        separator: str | None = None,
        progress: WorkProgress | None = None,
    ) -> None:
        if not 0 < validation < 1:
            raise ValueError(
                f"the share for validation is {validation}; it must be between 0 and 1, for example 0.01"
            )
        self._paths, self._field, self._separator = paths, field, separator
        self._hashes, sizes = array("Q"), array("Q")
        self.total = 0
        progress = progress or WorkProgress(Console(quiet=True))
        with progress.piece("reading", None, "bytes of text"):
            for found in self._texts():
                self.total += len(found.text)
                progress.update(self.total)
                if found.ends:
                    self._hashes.append(found.hash)
                    sizes.append(found.size)
        if not self._hashes:
            raise ValueError("the files have no text; give other files")
        if separator is not None and not any(has_line(path, separator) for path in paths):
            raise ValueError(
                f"the separator is {separator!r}, but no text file has such a line; give the line as "
                "it is in the text, or leave --separator out"
            )
        # A single document is divided at the good place nearest to this offset.
        self._cut_at: float | None = None
        self._chosen: frozenset[int] = frozenset()
        if len(self._hashes) == 1:
            self._cut_at = self.total * (1 - validation)
        else:
            self._chosen = _chosen(np.array(self._hashes), np.array(sizes), self.total * validation)
        self.recipe = {
            "name": name,
            "documents": hashlib.sha256(self._hashes.tobytes()).hexdigest(),
            "num_files": len(paths),
            "validation": validation,
        }

    def _all_pieces(self) -> Iterator[Piece]:
        hashes = iter(self._hashes)
        expected = next(hashes, None)
        for found in self._texts():
            if expected is None or (found.ends and found.hash != expected):
                raise _changed(found.path)
            if self._cut_at is None:
                split = "val" if expected in self._chosen else "train"
                yield Piece(split=split, text=found.text, ends=found.ends, origin=found.origin)
            else:
                yield from self._divided(found, self._cut_at)
            if found.ends:
                expected = next(hashes, None)
        if expected is not None:
            raise _changed(self._paths[-1])

    def _divided(self, found: _Text, cut_at: float) -> Iterator[Piece]:
        """Yield a piece of the single document: for one split, or in two if the cut is in it."""
        begin, place = found.size - len(found.text), 0
        if found.size <= cut_at:
            place = len(found.text)
        elif begin <= cut_at:
            place = nearest_cut(found.text, cut_at - begin) or 0
            if place == begin == 0:
                raise ValueError(
                    f"the text is one document of {self.total} bytes without a place to cut off its end for "
                    "validation: a space or a newline after a visible character. Add some, or give more "
                    "documents"
                )
        for split, text in (("train", found.text[:place]), ("val", found.text[place:])):
            if text:
                is_last = found.ends and split == "val"
                yield Piece(split=split, text=text, ends=is_last, origin=found.origin)

    def _texts(self) -> Iterator[_Text]:
        for path in self._paths:
            digest, size = hashlib.blake2b(digest_size=8), 0
            for origin, text, ends in texts(path, self._field, self._separator):
                digest.update(text)
                size += len(text)
                yield _Text(path, origin, text, ends, size, int.from_bytes(digest.digest(), "little"))
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
    *,
    field: str = "text",
    separator: str | None = None,
    progress: WorkProgress | None = None,
) -> TextFiles:
    """Return the text of the user's files and folders."""
    files, skipped = find_files(paths)
    if skipped and progress is not None:
        progress.say(
            f"skipping {len(skipped)} files, such as {skipped[0]}, whose names do not end with one of "
            f"{NAMES}. To read them, name them explicitly"
        )
    return TextFiles("text", files, validation, field=field, separator=separator, progress=progress)


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
    for path in [*_sources(Path(folders["stdlib"])), *sorted(_sources(packages), key=place)]:
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


def _sources(folder: Path) -> list[Path]:
    return [path for path in files_below(folder, _SKIPPED_FOLDERS.__contains__) if path.suffix == ".py"]


class Enwik8(Corpus):
    """The first 10^8 bytes of an English Wikipedia dump, split as usual: 90, 5 and 5 million bytes."""

    splits = ("train", "val", "test")

    def __init__(self, path: Path, sizes: tuple[int, int, int] = (90_000_000, 5_000_000, 5_000_000)) -> None:
        self.total = sum(sizes)
        if not path.is_file() or path.stat().st_size != self.total:
            raise ValueError(
                f"{path} is not a file of {self.total} bytes, as enwik8 is. Give the unzipped file, or use "
                "`merit prepare text` for other text"
            )
        self._path, self._sizes = path, sizes
        self.recipe = {"name": "enwik8", "sha256": hash_file(path), "sizes": list(sizes)}

    def _all_pieces(self) -> Iterator[Piece]:
        with self._path.open("rb") as file:
            for split, size in zip(self.splits, self._sizes, strict=True):
                for text, ends in cut([file.read(size)], PIECE_BYTES):
                    yield Piece(split=split, text=text, ends=ends, origin=str(self._path))


class Hub(Corpus):
    """The first documents of some splits of a dataset on the hub, streamed one split after the other.

    The datasets library keeps the position, so that after an interruption only the current file is
    downloaded again.

    Args:
        name: of the corpus.
        dataset: where it is, as arguments of datasets.load_dataset.
        num_documents: how many to take of each of its splits.
        is_validation: whether a document is for validation, by the split and its number there.
    """

    unit = "documents"
    begin = (0, 0, None)

    def __init__(
        self,
        name: str,
        dataset: Mapping[str, Any],
        num_documents: Mapping[str, int],
        is_validation: Callable[[str, int], bool],
    ) -> None:
        for split, num in num_documents.items():
            check_at_least(f"the number of {split} documents", num, 1)
        try:
            import datasets  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError(
                f"{name} needs the package datasets, which is not installed: pip install 'merit-optim[eval]'"
            ) from error
        self._load: Callable[..., Any] = datasets.load_dataset
        self.recipe = {"name": name, "dataset": dataset, "num_documents": num_documents}
        self.total = sum(num_documents.values())
        self._dataset, self._num_documents, self._is_validation = dataset, num_documents, is_validation
        self._place: tuple[int, int, Any] = self.begin

    def position(self) -> tuple[int, int, Any]:
        """Return the number of the split, that of its documents yielded, and the library's position in it."""
        number, done, stream = self._place
        return number, done, stream and stream.state_dict()

    def pieces(self, position: Any) -> Iterator[Piece]:
        """Yield the documents after a position."""
        first, done, state = position
        for number, (split, wanted) in enumerate(self._num_documents.items()):
            if number < first:
                continue
            stream = self._load(**self._dataset, split=split, streaming=True)
            if state is not None:
                stream.load_state_dict(state)
            for row in itertools.islice(stream, wanted - done):
                origin = f"{self.recipe['name']}, {split} document {done}"
                side = "val" if self._is_validation(split, done) else "train"
                done += 1
                self._place = (number, done, stream)
                yield Piece(split=side, text=row["text"].encode(), ends=True, origin=origin)
            if done != wanted:
                raise ValueError(
                    f"{self.recipe['name']}: {split} ended after {done} documents; {wanted} were expected: "
                    "request fewer, or the hub's copy has changed"
                )
            done, state = 0, None


def openwebtext(num_documents: int | None) -> Hub:
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
    dataset = {"path": "Skylion007/openwebtext"}
    return Hub("openwebtext", dataset, {"train": num_documents}, lambda _, number: number in validation)


def c4(train_documents: int, validation_documents: int) -> Hub:
    """Return the first documents of English C4's training and validation sets."""
    num_documents = {"validation": validation_documents, "train": train_documents}
    dataset = {"path": "allenai/c4", "name": "en"}
    return Hub("c4", dataset, num_documents, lambda split, _: split == "validation")


def nanogpt_validation(num_documents: int) -> frozenset[int]:
    """Return the documents in nanoGPT's validation set, out of ``num_documents``."""
    permuted = np.random.default_rng(_NANOGPT_SEED).permutation(num_documents)
    return frozenset(permuted[: math.ceil(_NANOGPT_SHARE * num_documents)].tolist())
