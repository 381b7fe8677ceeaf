"""Token files that grow part by part and survive an interruption at any moment.

A part is appended to the files and flushed to disk, and only then entered in a journal, with the state of the
corpus. After an interruption, the files are truncated to what the journal says, and the work continues there.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from merit_lab.data.tokenizer import Tokens

TOKENIZER_FILE = "tokenizer.json"
_JOURNAL = "journal.jsonl"
_HEADER_BEGINS = b'{"recipe": {'  # identifies a journal as ours, even if its first line is incomplete


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The content of a token file, in numbers."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    num_documents: int = 0

    def plus(self, other: Counts) -> Counts:
        """Return the sum of both."""
        return Counts(
            num_tokens=self.num_tokens + other.num_tokens,
            num_text_bytes=self.num_text_bytes + other.num_text_bytes,
            num_documents=self.num_documents + other.num_documents,
        )


class Parts:
    """Unfinished token files in a separate folder, for one process at a time.

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
        self._splits = splits
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._header = {"recipe": recipe, "dtype": dtype}
        self._files: dict[str, BinaryIO] = {}
        self.state: Any = None
        self.counts: dict[str, Counts] = {}
        self.is_complete = False
        self._refuse_what_is_not_ours()
        folder.mkdir(parents=True, exist_ok=True)
        no_link = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._journal = os.fdopen(os.open(folder / _JOURNAL, no_link, 0o666), "a+b")
        try:
            self._lock()
            entries = self._read_journal()
            if not entries:
                self.restart()
            elif entries[0] == self._header:
                self._take_up(entries[1:])
            elif overwrite or len(entries) == 1:  # no part was written yet, so nothing is lost
                self.restart()
            else:
                raise ValueError(
                    f"{folder} holds unfinished files of another recipe: {entries[0]}. Finish them with the "
                    "command that started them, choose another --out, or delete them with --overwrite"
                )
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """Delete all files and start over."""
        for name in self._names - {_JOURNAL}:
            (self.folder / name).unlink(missing_ok=True)
        self._journal.truncate(0)
        self._enter(self._header)
        self._take_up([])

    def append(
        self, tokens: Mapping[str, Sequence[Tokens]], counts: Mapping[str, Counts], state: Any
    ) -> None:
        """Add a part: tokens by split, their counts, and the state of the corpus after them."""
        try:
            for split, arrays in tokens.items():
                if arrays:
                    self._open(split).write(np.concatenate(arrays).astype(self._dtype).tobytes())
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self.counts = {split: self.counts[split].plus(counts[split]) for split in self._splits}
            self.state = state
            self._enter_counts(complete=False)
        except OSError as error:
            raise OSError(
                error.errno,
                f"writing to {self.folder} failed: {error.strerror}. Earlier parts are kept: fix the cause "
                "(free some disk space) and run the same command again to continue",
            ) from error

    def complete(self) -> None:
        """Mark the files as complete."""
        self._enter_counts(complete=True)

    def path(self, split: str) -> Path:
        """Return the unfinished file of a split."""
        return self.folder / f"{split}.bin"

    def remove(self) -> None:
        """Delete the journal and the folder, from which the files have been moved."""
        self.close()
        (self.folder / _JOURNAL).unlink()
        self.folder.rmdir()

    def close(self) -> None:
        """Close the files and release the lock."""
        for file in [*self._files.values(), self._journal]:
            file.close()
        self._files.clear()

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
        return {_JOURNAL, TOKENIZER_FILE, f"{TOKENIZER_FILE}.tmp", *splits}

    def _refuse_what_is_not_ours(self) -> None:
        """Raise ValueError if the folder or a file in it is not ours: files in it may be deleted later."""
        if self.folder.is_symlink():
            raise self._foreign("it is a link")
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise self._foreign("it is not a folder")
        paths = sorted(self.folder.iterdir())
        for path in paths:
            if path.name not in self._names or path.is_symlink() or not path.is_file():
                raise self._foreign(f"it holds {path.name}")
        # The first line of the journal is written before any other file.
        journal = self.folder / _JOURNAL
        if paths not in ([], [journal]) and (not journal.exists() or journal.stat().st_size == 0):
            raise self._foreign(f"it holds {paths[0].name} and no journal")

    def _foreign(self, why: str) -> ValueError:
        return ValueError(
            f"{self.folder} was not written by `merit prepare`, which needs that name for unfinished files: "
            f"{why}. Move it elsewhere, or choose another --out"
        )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is preparing {self.folder.parent}; wait for it, or choose another --out"
            ) from None

    def _read_journal(self) -> list[Any]:
        """Return the complete lines of the journal; an incomplete last line is removed."""
        self._journal.seek(0)
        content = self._journal.read()
        if not content.startswith(_HEADER_BEGINS[: len(content)]):
            raise self._foreign(f"its {_JOURNAL} is from another program")
        end = content.rfind(b"\n") + 1
        self._journal.truncate(end)
        try:
            return [json.loads(line) for line in content[:end].splitlines()]
        except ValueError as error:
            raise ValueError(
                f"{self.folder / _JOURNAL} is damaged ({error}); remove the folder {self.folder}"
            ) from error

    def _take_up(self, entries: list[Any]) -> None:
        last = entries[-1] if entries else {"state": None, "complete": False, "files": {}}
        self.state = last["state"]
        self.is_complete = last["complete"]
        self.counts = {split: Counts(**last["files"].get(split, {})) for split in self._splits}
        for split in self._splits:
            if not self.is_complete:
                self._cut(split)

    def _cut(self, split: str) -> None:
        """Truncate a file to the length in the journal."""
        wanted = self.counts[split].num_tokens * self._dtype.itemsize
        with self.path(split).open("ab") as file:
            if file.tell() < wanted:
                raise ValueError(
                    f"{self.path(split)} has {file.tell()} bytes, but the journal says {wanted}: it was "
                    f"changed; remove the folder {self.folder} and start over"
                )
            file.truncate(wanted)

    def _open(self, split: str) -> BinaryIO:
        if split not in self._files:
            self._files[split] = self.path(split).open("ab")
        return self._files[split]

    def _enter_counts(self, *, complete: bool) -> None:
        files = {split: asdict(counts) for split, counts in self.counts.items()}
        self._enter({"state": self.state, "complete": complete, "files": files})
        self.is_complete = complete

    def _enter(self, entry: Any) -> None:
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
