"""Token files that grow part by part and survive an interruption at any moment.

A part is appended to the files and flushed to disk, and only then entered in state.json: the corpus's
position, and the length and checksum of each file, with a checksum of their own. After an interruption the
files are cut to what it says, and the work continues there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKENIZER_FILE = "tokenizer.json"
STATE_FILE = "state.json"
_WRITTEN = (STATE_FILE, TOKENIZER_FILE)
# What may be in the folder: the files of any corpus, as another may have been started.
_NAMES = {"train.bin", "val.bin", "test.bin", *_WRITTEN, *(f"{name}.tmp" for name in _WRITTEN)}


@dataclass(kw_only=True)
class Counts:
    """The content of a token file, in numbers."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    num_documents: int = 0
    crc32: int = 0


@contextlib.contextmanager
def open_parts(
    folder: Path, *, splits: Sequence[str], dtype: str, recipe: Mapping[str, Any], overwrite: bool
) -> Iterator[Parts]:
    """Yield the unfinished token files in a folder, for one process at a time.

    Args:
        folder: used for nothing else; created if it does not exist.
        splits: the files "<split>.bin".
        dtype: of their tokens.
        recipe: what determines the files; unfinished files of another recipe are refused.
        overwrite: delete unfinished files of another recipe instead.
    """
    _refuse_what_is_not_ours(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is preparing {folder.parent}; wait for it, or choose another --out"
            ) from None
        yield Parts(folder, splits, {"recipe": recipe, "dtype": dtype}, overwrite=overwrite)
    finally:
        os.close(lock)  # ends the lock


class Parts:
    """Unfinished token files; see `open_parts`.

    ``counts`` are those of each file and ``state`` the corpus's position, both after the last part; ``index``
    describes the files once they are complete.
    """

    def __init__(
        self, folder: Path, splits: Sequence[str], made: Mapping[str, Any], *, overwrite: bool
    ) -> None:
        self.folder = folder
        self.dtype: np.dtype[Any] = np.dtype(str(made["dtype"])).newbyteorder("<")
        self.way_out = f"remove the folder {folder} to start over"
        self._made, self._splits = made, splits
        self.counts = {split: Counts() for split in splits}
        self.state: Any = None
        self.index: Any = None
        saved = self._read()
        earlier = saved and {name: saved.get(name) for name in made}
        # Without a part nothing is lost.
        if saved is None or (earlier != made and (overwrite or saved["state"] is None)):
            self.restart()
            return
        if earlier != made:
            raise ValueError(
                f"{folder} holds unfinished files of another recipe: {earlier}. Finish them with the "
                "command that started them, choose another --out, or delete them with --overwrite"
            )
        self.state, self.index = saved["state"], saved["index"]
        self.counts = {split: Counts(**saved["files"][split]) for split in splits}
        if self.index is None:
            self._cut_to_what_was_entered()

    def restart(self) -> None:
        """Delete all files and start over."""
        self.state = self.index = None
        self.counts = {split: Counts() for split in self._splits}
        self._save()
        for name in _NAMES - {STATE_FILE}:
            (self.folder / name).unlink(missing_ok=True)

    def append(self, tokens: Mapping[str, Iterable[np.ndarray]], state: Any) -> None:
        """Write a part: tokens by split, and the corpus's state after it. Its text is in ``counts``."""
        try:
            for split, arrays in tokens.items():
                counts = self.counts[split]
                with self.path(split).open("ab") as file:
                    for array in arrays:
                        content = array.astype(self.dtype).tobytes()
                        file.write(content)
                        counts.num_tokens += len(array)
                        counts.crc32 = zlib.crc32(content, counts.crc32)
                    file.flush()
                    os.fsync(file.fileno())
            self.state = state
            self._save()
        except OSError as error:
            raise OSError(
                error.errno,
                f"writing to {self.folder} failed: {error.strerror}. Earlier parts are kept: fix the cause "
                "(free some disk space) and run the same command again to continue",
            ) from error

    def complete(self, index: Any) -> None:
        """Mark the files as complete, with what describes them."""
        self.index = index
        self._save()

    def check(self, split: str) -> None:
        """Raise ValueError if a file has not the bytes that were written."""
        size, crc32 = 0, 0
        with self.path(split).open("rb") as file:
            while block := file.read(1 << 20):
                size, crc32 = size + len(block), zlib.crc32(block, crc32)
        if (size, crc32) != (self._size(split), self.counts[split].crc32):
            raise self._changed(split, size)

    def path(self, split: str) -> Path:
        """Return the unfinished file of a split."""
        return self.folder / f"{split}.bin"

    def remove(self) -> None:
        """Delete the folder, from which the files have been moved."""
        (self.folder / STATE_FILE).unlink()
        self.folder.rmdir()

    def _read(self) -> Any:
        """Return what was entered last; None if nothing was."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        entry, _, checksum = path.read_bytes().partition(b"\n")
        if checksum != b"%08x\n" % zlib.crc32(entry):
            raise ValueError(
                f"{path} is damaged, or not of `merit prepare` (it does not match its checksum); "
                f"{self.way_out}"
            )
        return json.loads(entry)

    def _cut_to_what_was_entered(self) -> None:
        for split in self._splits:
            with self.path(split).open("ab") as file:
                if file.tell() < self._size(split):
                    raise self._changed(split, file.tell())
                file.truncate(self._size(split))

    def _changed(self, split: str, size: int) -> ValueError:
        return ValueError(
            f"{self.path(split)} has {size} bytes, and not the {self._size(split)} that were written: it was "
            f"changed or damaged; {self.way_out}"
        )

    def _size(self, split: str) -> int:
        return self.counts[split].num_tokens * self.dtype.itemsize

    def _save(self) -> None:
        files = {split: asdict(counts) for split, counts in self.counts.items()}
        entry = {**self._made, "state": self.state, "index": self.index, "files": files}
        content = json.dumps(entry).encode()
        write_atomically(self.folder / STATE_FILE, b"%s\n%08x\n" % (content, zlib.crc32(content)))


def _refuse_what_is_not_ours(folder: Path) -> None:
    """Raise ValueError if the folder or a file in it is not ours: files in it may be deleted later."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    ours = {path for path in paths if path.name in _NAMES and path.is_file() and not path.is_symlink()}
    if not (folder / STATE_FILE).is_file():  # which is written before any other file
        ours &= {folder / f"{STATE_FILE}.tmp"}
    strange = [path.name for path in paths if path not in ours]
    if strange or folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} was not written by `merit prepare`, which needs that name for unfinished files: "
            f"{f'it holds {strange[0]}' if strange else 'it is not a folder'}. Move it elsewhere, or choose "
            "another --out"
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is whole or not there, also after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link, which must not be followed
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
