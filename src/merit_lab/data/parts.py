"""Token files that grow part by part and survive an interruption at any moment.

A part is appended to the files and flushed to disk, and only then entered in state.json: the corpus's
position, and the length and checksum of each file, with a checksum of their own. After an interruption the
files are cut to what it says, and the work continues there.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

TOKENIZER_FILE = "tokenizer.json"
STATE_FILE = "state.json"
_OUR_BEGINNING = b'{"recipe": {'


@dataclass(kw_only=True)
class Counts:
    """The content of a token file, in numbers."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    num_documents: int = 0
    crc32: int = 0


class Parts:
    """Unfinished token files in a separate folder, for one process at a time.

    ``counts`` are those of each file and ``state`` the corpus's position, both after the last part; ``index``
    describes the files once they are complete.

    Args:
        folder: the folder, used for nothing else; created if it does not exist.
        splits: the files "<split>.bin".
        dtype: of their tokens.
        recipe: what determines the files; unfinished files of another recipe are refused.
        overwrite: delete unfinished files of another recipe instead.
    """

    def __init__(
        self, folder: Path, *, splits: Sequence[str], dtype: str, recipe: Mapping[str, Any], overwrite: bool
    ) -> None:
        self.folder = folder
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.way_out = f"remove the folder {folder} to start over"
        self._splits = splits
        self._made = {"recipe": recipe, "dtype": dtype}
        self._files: dict[str, BinaryIO] = {}
        self.counts: dict[str, Counts] = {}
        self.state: Any = None
        self.index: Any = None
        self._refuse_what_is_not_ours()
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is preparing {folder.parent}; wait for it, or choose another --out"
                ) from None
            saved = self._read()
            made = saved and {name: saved[name] for name in self._made}
            if saved is not None and made == self._made:
                self.state, self.index = saved["state"], saved["index"]
                self.counts = {split: Counts(**saved["files"][split]) for split in splits}
                if self.index is None:
                    self._open()
            elif saved is None or overwrite or saved["state"] is None:  # without a part nothing is lost
                self.restart()
            else:
                raise ValueError(
                    f"{folder} holds unfinished files of another recipe: {made}. Finish them with the "
                    "command that started them, choose another --out, or delete them with --overwrite"
                )
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Delete all files and start over."""
        self.state = self.index = None
        self.counts = {split: Counts() for split in self._splits}
        self._save()
        for name in self._names - {STATE_FILE}:
            (self.folder / name).unlink(missing_ok=True)
        self._open()

    def append(self, tokens: Mapping[str, Iterable[np.ndarray]], state: Any) -> None:
        """Write a part: tokens by split, and the corpus's state after it. Its text is in ``counts``."""
        try:
            for split, arrays in tokens.items():
                counts = self.counts[split]
                for array in arrays:
                    content = array.astype(self.dtype).tobytes()
                    self._files[split].write(content)
                    counts.num_tokens += len(array)
                    counts.crc32 = zlib.crc32(content, counts.crc32)
            for file in self._files.values():
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
            raise ValueError(
                f"{self.path(split)} has {size} bytes, and not the {self._size(split)} that were written: it "
                f"was changed or damaged; {self.way_out}"
            )

    def path(self, split: str) -> Path:
        """Return the unfinished file of a split."""
        return self.folder / f"{split}.bin"

    def remove(self) -> None:
        """Delete the folder, from which the files have been moved."""
        (self.folder / STATE_FILE).unlink()
        self.folder.rmdir()

    def close(self) -> None:
        """Close the files and release the lock."""
        for file in self._files.values():
            file.close()
        os.close(self._lock)

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _names(self) -> set[str]:
        """The names that may be in the folder: the files of any corpus, as another may have been started."""
        splits = {f"{split}.bin" for split in ("train", "val", "test", *self._splits)}
        written = (STATE_FILE, TOKENIZER_FILE)
        return {*splits, *written, *(f"{name}.tmp" for name in written)}

    def _refuse_what_is_not_ours(self) -> None:
        """Raise ValueError if the folder or a file in it is not ours: files in it may be deleted later."""
        folder, state = self.folder, self.folder / STATE_FILE
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        strange = [path for path in paths if path.is_symlink() or not path.is_file()]
        strange += [path for path in paths if path.name not in self._names]
        if state.is_file() and not strange:
            with state.open("rb") as file:
                strange = [] if file.read(len(_OUR_BEGINNING)) == _OUR_BEGINNING else [state]
        elif not strange:  # the state is written before any other file
            strange = [path for path in paths if path.name != f"{STATE_FILE}.tmp"]
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or strange:
            why = f"it holds {strange[0].name}" if strange else "it is not a folder"
            raise ValueError(
                f"{folder} was not written by `merit prepare`, which needs that name for unfinished files: "
                f"{why}. Move it elsewhere, or choose another --out"
            )

    def _read(self) -> Any:
        """Return what was entered last; None if nothing was."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        entry, _, checksum = path.read_bytes().partition(b"\n")
        if checksum != b"%08x\n" % zlib.crc32(entry):
            raise ValueError(f"{path} is damaged: it does not match its checksum; {self.way_out}")
        return json.loads(entry)

    def _open(self) -> None:
        """Open the files, cut to the length that was entered."""
        for split in self._splits:
            file = self._files[split] = self.path(split).open("ab")
            if file.tell() < self._size(split):
                raise ValueError(
                    f"{self.path(split)} has {file.tell()} bytes, and not the {self._size(split)} that were "
                    f"written: it was changed; {self.way_out}"
                )
            file.truncate(self._size(split))

    def _size(self, split: str) -> int:
        return self.counts[split].num_tokens * self.dtype.itemsize

    def _save(self) -> None:
        files = {split: asdict(counts) for split, counts in self.counts.items()}
        entry = {**self._made, "state": self.state, "index": self.index, "files": files}
        content = json.dumps(entry).encode()
        write_atomically(self.folder / STATE_FILE, b"%s\n%08x\n" % (content, zlib.crc32(content)))


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
