"""Token files in nanoGPT's format, flat, little-endian and memory-mapped; and dataset.json, their index."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from merit_lab.json_values import build, decode

if TYPE_CHECKING:
    import torch

INDEX_NAME = "dataset.json"
TOKENIZER_NAME = "tokenizer.json"
_FORMAT = "merit-optim tokens 3"
_FILES = ("train.bin", "val.bin")
_AGAIN = "prepare the data again with --overwrite"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 12  # read to detect changes


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One token file: its length, the amount of text, its hash, and the hash of a sample of its bytes."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    num_documents: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    sample_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of dataset.json, which detects wrong or truncated files.

    ``recipe`` determines the files: corpus, tokenizer, share of validation text. Two folders with the same
    recipe hold the same bytes. ``position`` is where the corpus continues if the files are not complete.
    """

    format: str = _FORMAT
    recipe: dict[str, Any]
    tokenizer_sha256: str | None
    vocab_size: int
    end_of_text: int | None
    dtype: Literal["uint16", "uint32"]
    files: dict[str, FileEntry]
    position: Any

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name."""
        return str(self.recipe["tokenizer"])

    @property
    def is_complete(self) -> bool:
        """Whether all text is in the files."""
        return self.position is None

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the data, independent of names and folders."""
        return fingerprint(*(self.files[name].sha256 for name in _FILES))

    def to_json(self) -> str:
        """Return the content of dataset.json."""
        content = asdict(self)
        content["crc32"] = _crc32(content)
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read and check a dataset.json."""
        try:
            content = decode(path.read_bytes())
            checksum = content.pop("crc32", None) if isinstance(content, dict) else None
            index = build(cls, content)
            if index.format != _FORMAT:
                raise ValueError(f"its format is {index.format!r}")
            if checksum != _crc32(content):
                raise ValueError("it does not match its checksum")
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged, or not of this version of `merit prepare` ({error}): {_AGAIN}; to use "
                "the token files beside it as they are, remove or rename it"
            ) from error
        return index


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def fingerprint(train_sha256: str, validation_sha256: str) -> str:
    """Return a sha256 over the hashes of the training and the validation file."""
    return hashlib.sha256(f"train.bin {train_sha256}\nval.bin {validation_sha256}\n".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of token ids and nothing else; ``tokens`` is its memory map, read-only."""

    path: Path
    tokens: np.ndarray
    _on_devices: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path, dtype: str = "uint16", entry: FileEntry | None = None) -> TokenFile:
        """Map a file. Raise ValueError if it is missing, empty, or not what its index says.

        Without an index, its length must be that of a file of tokens.
        """
        if not path.is_file():
            raise ValueError(f"{path} is missing; `merit prepare` writes it")
        size, item = path.stat().st_size, np.dtype(dtype).itemsize
        if entry is not None and (size, hash_sample(path)) != (entry.num_tokens * item, entry.sample_sha256):
            raise ValueError(
                f"{path} was changed or damaged after it was prepared: it does not match {INDEX_NAME}. "
                f"Restore the old file, or {_AGAIN}"
            )
        if size == 0 or size % item:
            raise ValueError(
                f"{path} has {size} bytes, which are no tokens of {dtype}: it is empty, was truncated, or is "
                "another kind of file"
            )
        return cls(path, np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r"))

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self.tokens)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return all tokens on a device, copied once: signed integers of the size and bits of the file's."""
        import torch

        if device not in self._on_devices:
            dtype = torch.int16 if self.tokens.itemsize == 2 else torch.int32
            mapped = torch.from_file(str(self.path), size=self.num_tokens, dtype=dtype)
            self._on_devices[device] = mapped.to(device)
        return self._on_devices[device]

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if a token is outside the vocabulary."""
        place = self._place_of_largest
        if (largest := int(self.tokens[place])) >= vocab_size:
            raise ValueError(
                f"{self.path}: token {place} is {largest}, but the vocabulary has {vocab_size} entries; the "
                f"file is of another tokenizer, has another dtype than {self.tokens.dtype}, or is damaged"
            )

    @cached_property
    def _place_of_largest(self) -> int:
        return int(self.tokens.argmax())


@dataclass(frozen=True, eq=False)
class Dataset:
    """A folder with train.bin and val.bin, and the index that `merit prepare` writes.

    A folder written by nanoGPT has no index: its vocabulary is unknown, and it cannot be verified.
    """

    folder: Path
    train: TokenFile
    validation: TokenFile
    index: Index | None

    @classmethod
    def open(cls, folder: Path | str) -> Dataset:
        """Open a folder, and check the sizes of its files and a sample of their bytes: see `hash_sample`.

        Without an index the tokens are uint16, as nanoGPT writes them.
        """
        folder = Path(folder)
        if folder.is_file():
            raise ValueError(
                f"{folder} is a file; training needs a folder of tokens, as `merit prepare text {folder}` "
                "writes it"
            )
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; create it with `merit prepare`")
        path = folder / INDEX_NAME
        if not path.is_file():
            train, validation = (TokenFile.open(folder / name) for name in _FILES)
            return cls(folder, train, validation, index=None)
        index = Index.read(path)
        if not index.is_complete:
            raise ValueError(f"{folder} is not complete: the command that prepares it continues")
        train, validation = (TokenFile.open(folder / name, index.dtype, index.files[name]) for name in _FILES)
        return cls(folder, train, validation, index)

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary; None without an index."""
        return None if self.index is None else self.index.vocab_size

    @property
    def tokenizer(self) -> str:
        """The tokenizer's name; "unknown" without an index."""
        return "unknown" if self.index is None else self.index.tokenizer

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document; None if there is none, or no index."""
        return None if self.index is None else self.index.end_of_text

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per validation token: converts a loss per token to one per byte."""
        if self.index is None:
            return None
        entry = self.index.files["val.bin"]
        return entry.num_text_bytes / entry.num_tokens

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies the data: from the index, or without one by reading both files."""
        if self.index is not None:
            return self.index.fingerprint
        return fingerprint(hash_file(self.train.path), hash_file(self.validation.path))

    def verify(self) -> Index:
        """Read every file of the index, and return it. Raise ValueError if a hash does not match."""
        if self.index is None:
            raise ValueError(f"{self.folder} has no {INDEX_NAME}, so there is nothing to compare with")
        expected = {name: entry.sha256 for name, entry in self.index.files.items()}
        if self.index.tokenizer_sha256 is not None:
            expected[TOKENIZER_NAME] = self.index.tokenizer_sha256
        for name, sha256 in expected.items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} is missing; {_AGAIN}")
            if (actual := hash_file(path)) != sha256:
                raise ValueError(
                    f"{path} has the sha256 {actual}, but {INDEX_NAME} says {sha256}: it was changed or "
                    f"damaged; {_AGAIN}"
                )
        return self.index


def hash_file(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_sample(path: Path) -> str:
    """Return the sha256 of 64 blocks of 4 KiB, spread evenly over a file, including the first and the last.

    It takes milliseconds and detects a replaced file; single changed bytes are detected only by reading all
    of it.
    """
    size = path.stat().st_size
    if size <= _SAMPLES * _SAMPLE_BYTES:
        return hash_file(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for number in range(_SAMPLES):
            file.seek(number * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
