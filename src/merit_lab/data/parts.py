"""Token files that grow part by part and survive an interruption at any moment.

A part is appended to the files and flushed to disk, and only then entered in dataset.json: the corpus's
position, and the length and hash of each file. After an interruption the files are cut to what it says, and
the work continues there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from merit_lab.data.corpora import Piece
from merit_lab.data.tokenizer import Tokens
from merit_lab.data.tokens import INDEX_NAME, TOKENIZER_NAME, FileEntry, Index, hash_file, hash_sample
from merit_lab.durable import replacing, sync_folder, write

# All that may be in the folder: the files of any corpus, as another may have been prepared there.
NAMES = (INDEX_NAME, "train.bin", "val.bin", "test.bin", TOKENIZER_NAME)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder, and keep other processes from preparing data there; one left empty is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is preparing {folder}; wait for it, or choose another --out"
            ) from None
        yield
    finally:
        os.close(lock)  # ends the lock
        with contextlib.suppress(OSError):
            folder.rmdir()


class Parts:
    """Token files in a folder, and their index as it was entered last."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._dtype: np.dtype[Any] = np.dtype(index.dtype).newbyteorder("<")
        self._hashes = {name: hashlib.sha256() for name in index.files}

    @classmethod
    def start(cls, folder: Path, index: Index, tokenizer: bytes | None) -> Parts:
        """Replace what is in the folder by files without tokens, and the content of a tokenizer.json."""
        for name in NAMES[1:]:  # not overwritten, as a training may still read them; the index is last
            (folder / name).unlink(missing_ok=True)
        parts = cls(folder, index)
        parts._enter(index)
        if tokenizer is not None:
            with replacing(folder / TOKENIZER_NAME) as path:
                path.write_bytes(tokenizer)
        return parts

    @classmethod
    def resume(cls, folder: Path, index: Index) -> Parts:
        """Return files as they were entered last. Raise ValueError if they are not there any more."""
        parts = cls(folder, index)
        for name, entry in index.files.items():
            path, size = folder / name, entry.num_tokens * parts._dtype.itemsize
            if path.is_symlink() or not path.is_file() or path.stat().st_size < size:
                raise parts._changed(name)
            os.truncate(path, size)
            with path.open("rb") as file:
                parts._hashes[name] = hashlib.file_digest(file, "sha256")
            parts._check(name, parts._hashes[name].hexdigest())
        tokenizer = folder / TOKENIZER_NAME
        if index.tokenizer_sha256 is not None and (
            not tokenizer.is_file() or hash_file(tokenizer) != index.tokenizer_sha256
        ):
            raise parts._changed(TOKENIZER_NAME)
        return parts

    def append(self, part: Sequence[tuple[Piece, Tokens]], position: Any) -> None:
        """Write texts with their tokens, and the corpus's position after them."""
        files = {}
        try:
            for name, entry in self.index.files.items():
                mine = [(piece, tokens) for piece, tokens in part if f"{piece.split}.bin" == name]
                content = b"".join(tokens.astype(self._dtype).tobytes() for _, tokens in mine)
                with (self.folder / name).open("ab") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                self._hashes[name].update(content)
                files[name] = FileEntry(
                    num_tokens=entry.num_tokens + len(content) // self._dtype.itemsize,
                    num_text_bytes=entry.num_text_bytes + sum(len(piece.text) for piece, _ in mine),
                    num_documents=entry.num_documents + sum(piece.ends for piece, _ in mine),
                    sha256=self._hashes[name].hexdigest(),
                )
            sync_folder(self.folder)
            self._enter(replace(self.index, files=files, position=position))
        except OSError as error:
            raise OSError(
                error.errno,
                f"writing to {self.folder} failed: {error.strerror}. Earlier parts are kept: fix the cause "
                "(free some disk space) and run the same command again to continue",
            ) from error

    def complete(self) -> Index:
        """Compare the files with what was written, mark them as complete, and return their index."""
        files = {}
        for name, entry in self.index.files.items():
            if entry.num_tokens == 0:
                raise ValueError(f"the corpus has no text for {name}: prepare more of it")
            self._check(name, hash_file(self.folder / name))
            files[name] = replace(entry, sample_sha256=hash_sample(self.folder / name))
        self._enter(replace(self.index, files=files, position=None))
        return self.index

    def _enter(self, index: Index) -> None:
        write(self.folder / INDEX_NAME, index.to_json())
        self.index = index

    def _check(self, name: str, sha256: str) -> None:
        if sha256 != self.index.files[name].sha256:
            raise self._changed(name)

    def _changed(self, name: str) -> ValueError:
        return ValueError(
            f"{self.folder / name} does not hold what was written: it was changed or damaged; "
            "start over with --overwrite"
        )
