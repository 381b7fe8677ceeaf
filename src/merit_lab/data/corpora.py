"""Local corpora: text files, installed Python sources, enwik8."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from merit_lab.checks import check_at_least
from merit_lab.data.documents import DEFAULT_LAYOUT, Layout, find_files, has_line, texts
from merit_lab.data.formats import check_beginning, named_kinds
from merit_lab.data.hashes import Hashes
from merit_lab.data.pieces import TextPiece, cut
from merit_lab.data.progress import PrepareProgress
from merit_lab.data.tokens import hash_file

_SMALLEST_PIECE, _LARGEST_PIECE = 1 << 12, 1 << 16  # bytes
_FEWEST_PIECES = 8  # of a text that is larger than the smallest piece, so that most of it is left to train on
_TEST_FOLDERS = {"test", "tests", "idle_test"}


class TextFiles:
    """The documents of files, in order, with a share of their text for validation.

    Documents are cut into pieces of 4 to 64 KiB (1/256 of all text, within these limits), or of 1/8 of all
    text if that is less. A piece is for validation if the hash of its text, as a number from 0 to 1, is below
    the share, so the same text is always in the same split. If that selects no piece, the one with the
    smallest hash is used.

    The files are read once for the hashes, before anything is tokenized.
    """

    splits: tuple[str, ...] = ("train", "val")
    unit = "bytes"

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        validation: float,
        layout: Layout = DEFAULT_LAYOUT,
        progress: PrepareProgress | None = None,
    ) -> None:
        if not 0 < validation < 1:
            raise ValueError(
                f"the share for validation is {validation}; it must be between 0 and 1, for example 0.01"
            )
        self._paths = paths
        self._layout = layout
        self._piece_bytes = self._choose_piece_bytes()
        self._hashes = Hashes()
        self.total = 0
        content = hashlib.sha256()
        progress = progress or PrepareProgress(quiet=True)
        with progress.piece("reading", None, "bytes of text"):
            for _, _, text, ends in self._texts(self._piece_bytes):
                content.update(text)
                self._hashes.append(_hash(text))
                self.total += len(text)
                if ends:
                    content.update(b"\0end of file\0")
                progress.update(self.total)
        if layout.separator is not None and not any(has_line(path, layout.separator) for path in paths):
            raise ValueError(
                f"the separator is {layout.separator!r}, but no text file has such a line; give the line as "
                "it is in the text, or leave --separator out"
            )
        if len(self._hashes) < 2 and self.total > _SMALLEST_PIECE:
            raise ValueError(
                f"the text has {self.total} bytes, but no place to cut it: a space or a newline after a "
                "visible character. Add some, or give more text"
            )
        if len(self._hashes) < 2:
            raise ValueError(
                f"the text has {self.total} bytes, too few for training and validation text: give more than "
                f"{_SMALLEST_PIECE}, or more files"
            )
        if self._hashes.smallest == self._hashes.largest:
            raise ValueError(
                f"all {len(self._hashes)} pieces of the text are identical, so none is left for validation: "
                "give other text"
            )
        self._below = max(int(validation * 2**64), self._hashes.smallest + 1)
        if self._hashes.largest < self._below:
            raise ValueError(
                f"a share of {validation} for validation leaves nothing to train on: choose a smaller one"
            )
        self.recipe = {
            "name": name,
            "sha256": content.hexdigest(),
            "num_files": len(paths),
            "piece_bytes": self._piece_bytes,
            "validation": validation,
        }
        self._position = 0

    def state(self) -> int:
        """Return the number of pieces yielded."""
        return self._position

    def pieces(self, state: Any = None) -> Iterator[TextPiece]:
        """Yield all pieces, or those after the first ``state``."""
        first = state or 0
        self._position = 0
        hashes = iter(self._hashes)
        following = next(hashes, None)
        for path, origin, text, ends in self._texts(self._piece_bytes):
            expected, following = following, next(hashes, None)
            self._position += 1
            if self._position <= first:
                continue
            if expected != _hash(text) or (following is None and not ends):
                raise _changed(path)
            in_validation = expected < self._below
            goes_on = not ends and following is not None and (following < self._below) == in_validation
            yield TextPiece(
                split="val" if in_validation else "train", text=text, ends=not goes_on, origin=origin
            )
        if following is not None:
            raise _changed(self._paths[-1])

    def _texts(self, size: int) -> Iterator[tuple[Path, str, bytes, bool]]:
        for path in self._paths:
            for origin, text, ends in texts(path, self._layout, size):
                yield path, origin, text, ends

    def _choose_piece_bytes(self) -> int:
        """Return the size of the pieces; stop reading once the largest is reached."""
        num_bytes = 0
        for _, _, text, _ in self._texts(_LARGEST_PIECE):
            num_bytes += len(text)
            if num_bytes >= 256 * _LARGEST_PIECE:
                break
        if num_bytes <= _SMALLEST_PIECE:
            return _SMALLEST_PIECE
        size = min(max(num_bytes // 256, _SMALLEST_PIECE), _LARGEST_PIECE)
        return min(size, num_bytes // _FEWEST_PIECES)


def text_files(
    paths: Sequence[Path],
    validation: float,
    layout: Layout = DEFAULT_LAYOUT,
    progress: PrepareProgress | None = None,
) -> TextFiles:
    """Return the text of the user's files and folders."""
    if not paths:
        raise ValueError("no files are given; name at least one")
    files, left_out = find_files(paths)
    if left_out and progress is not None:
        progress.say(
            f"skipping {len(left_out)} files, such as {left_out[0]}, whose names do not end with one of "
            f"{named_kinds()}. To read them, name them explicitly"
        )
    for path in files:
        check_beginning(path)
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
    # By relative path, so that the corpus does not depend on where the environment is.
    candidates = [
        *sorted(_sources(Path(folders["stdlib"]))),
        *sorted(_sources(packages), key=lambda path: _hash(path.relative_to(packages).as_posix().encode())),
    ]
    paths, num_bytes = [], 0
    for path in candidates:
        text = path.read_bytes()
        if num_bytes + len(text) > limit:
            break
        if text and _is_utf8(text):
            paths.append(path)
            num_bytes += len(text)
    if not paths:
        raise ValueError(
            f"no Python sources of up to {limit} bytes are installed with {sys.executable}: raise the limit, "
            "or use `merit prepare text` with your own files"
        )
    return TextFiles("embedded", paths, validation)


class Enwik8:
    """The first 10^8 bytes of an English Wikipedia dump, split as usual: 90, 5 and 5 million bytes."""

    splits = ("train", "val", "test")
    unit = "bytes"

    def __init__(self, path: Path, sizes: tuple[int, int, int] = (90_000_000, 5_000_000, 5_000_000)) -> None:
        self.total = sum(sizes)
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if path.stat().st_size != self.total:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes; enwik8 has {self.total}. Give the unzipped file, "
                "or use `merit prepare text` for other text"
            )
        self._path = path
        self._sizes = sizes
        self.recipe = {"name": "enwik8", "sha256": hash_file(path), "sizes": list(sizes)}
        self._position = 0

    def state(self) -> int:
        """Return the number of pieces yielded."""
        return self._position

    def pieces(self, state: Any = None) -> Iterator[TextPiece]:
        """Yield all pieces, or those after the first ``state``."""
        first = state or 0
        self._position = 0
        with self._path.open("rb") as file:
            for split, size in zip(self.splits, self._sizes, strict=True):
                left = size
                for text in cut(io.BytesIO(file.read(size)), _LARGEST_PIECE):
                    left -= len(text)
                    position = self._position
                    self._position += 1
                    if position >= first:
                        yield TextPiece(split=split, text=text, ends=left == 0, origin=str(self._path))


def _changed(path: Path) -> ValueError:
    return ValueError(f"{path} changed while it was being read: start again when nothing writes to it")


def _sources(folder: Path) -> Iterator[Path]:
    """Yield Python files below a folder, except those of tests and of packages installed inside it."""
    skipped = _TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            if name.endswith(".py") and (path := Path(parent, name)).is_file():  # not a broken link
                yield path


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
