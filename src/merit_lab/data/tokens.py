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
_FORMAT, _VERSION = "merit-optim tokens", 2
_FILES = ("train.bin", "val.bin")
_BLOCK = 1 << 24  # tokens checked at a time: 32 or 64 MB
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 12  # read to detect changes

# Token files of other programs that would open without an error and be read as nonsense.
_FOREIGN_BEGINNINGS = {
    b"\x93NUMPY": "an array saved by numpy.save: write it with array.tofile instead",
    (20240520).to_bytes(4, "little"): "a shard of llm.c, with a header of 1024 bytes: remove that header",
}


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One token file: its length, the amount of text, its hash, and the hash of a sample of its bytes."""

    num_tokens: int
    num_text_bytes: int
    num_documents: int
    sha256: str
    sample_sha256: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of dataset.json, which detects wrong or truncated files.

    ``recipe`` determines the files: corpus, tokenizer, share of validation text. Two folders with the same
    recipe hold the same bytes. ``fingerprint`` identifies the data, independent of names and folders.
    """

    format: str = _FORMAT
    version: int = _VERSION
    fingerprint: str
    tokenizer: str
    vocab_size: int
    end_of_text: int | None
    dtype: Literal["uint16", "uint32"]
    recipe: dict[str, Any]
    files: dict[str, FileEntry]

    def to_json(self) -> bytes:
        """Return the content of dataset.json."""
        content = asdict(self)
        content["crc32"] = _crc32(content)
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read and check a dataset.json."""
        try:
            content = decode(path.read_bytes())
            checksum = content.pop("crc32", None) if isinstance(content, dict) else None
            index = build(cls, content)
            if (index.format, index.version) != (_FORMAT, _VERSION):
                raise ValueError(f"its format is {index.format!r}, version {index.version}")
            if index.fingerprint != fingerprint(*(index.files[name].sha256 for name in _FILES)):
                raise ValueError("its fingerprint does not match its hashes")
            if checksum != _crc32(content):
                raise ValueError("it does not match its checksum")
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged, or not of this version of `merit prepare` ({error}): prepare the data "
                "again; to use the token files beside it as they are, remove or rename it"
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
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path | str, dtype: str = "uint16", num_tokens: int | None = None) -> TokenFile:
        """Map a file. Raise ValueError if it is missing, empty, truncated or of another format.

        ``num_tokens`` is the expected number, if known.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is missing; `merit prepare` writes it")
        size = path.stat().st_size
        item = np.dtype(dtype).itemsize
        if size == 0:
            raise ValueError(f"{path} is empty; prepare the data again with more text")
        if num_tokens is not None and size != num_tokens * item:
            raise ValueError(
                f"{path} has {size} bytes, but {num_tokens} tokens of {dtype} are {num_tokens * item}: it "
                "was truncated or replaced; prepare the data again"
            )
        if size % item:
            raise ValueError(
                f"{path} has {size} bytes, which is not a multiple of {item}: it was truncated, or it is not "
                f"a file of {dtype} tokens"
            )
        with path.open("rb") as file:
            beginning = file.read(8)
        for signature, meaning in _FOREIGN_BEGINNINGS.items():
            if beginning.startswith(signature):
                raise ValueError(f"{path} is not a plain file of tokens but {meaning}")
        mapped = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
        return cls(path, mapped)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the file."""
        return len(self.tokens)

    def on(self, device: torch.device | str) -> torch.Tensor:
        """Return all tokens on a device, copied once: signed integers of the size and bits of the file's."""
        import torch

        device = torch.empty(0, device=device).device  # adds the index of the current GPU to "cuda"
        if device not in self._copies:
            signed = np.asarray(self.tokens).view(f"<i{self.tokens.itemsize}")
            copy = torch.empty(self.num_tokens, dtype=getattr(torch, signed.dtype.name), device=device)
            for begin in range(0, self.num_tokens, _BLOCK):
                copy[begin : begin + _BLOCK] = torch.from_numpy(signed[begin : begin + _BLOCK].copy())
            self._copies[device] = copy
        return self._copies[device]

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if a token is outside the vocabulary."""
        if vocab_size <= np.iinfo(self.tokens.dtype).max and self._largest[0] >= vocab_size:
            raise ValueError(
                f"{self.path}: token {self._largest[1]} is {self._largest[0]}, but the vocabulary has "
                f"{vocab_size} entries; the file belongs to another tokenizer, has another dtype than "
                f"{self.tokens.dtype}, or is damaged"
            )

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """The largest token and where it is first, computed once."""
        blocks = range(0, self.num_tokens, _BLOCK)
        places = [begin + int(self.tokens[begin : begin + _BLOCK].argmax()) for begin in blocks]
        place = max(places, key=lambda place: int(self.tokens[place]))
        return int(self.tokens[place]), place

    @cached_property
    def sha256(self) -> str:
        """The hash of the file, computed once."""
        return hash_file(self.path)


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
        index = Index.read(path) if path.is_file() else None
        if index is None:
            train, validation = (TokenFile.open(folder / name) for name in _FILES)
        else:
            train, validation = (
                TokenFile.open(folder / name, index.dtype, index.files[name].num_tokens) for name in _FILES
            )
            for file in (train, validation):
                recorded = index.files[file.path.name].sample_sha256
                if hash_sample(file.path) != recorded:
                    raise ValueError(
                        f"{file.path} was changed or damaged after it was prepared: its bytes do not match "
                        f"the hash in {INDEX_NAME}. Restore the old file, or prepare the data again"
                    )
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
        return fingerprint(self.train.sha256, self.validation.sha256)

    def verify(self) -> None:
        """Read every file of the index. Raise ValueError if its hash does not match."""
        if self.index is None:
            raise ValueError(f"{self.folder} has no {INDEX_NAME}, so there is nothing to compare with")
        for name, entry in self.index.files.items():
            actual = TokenFile.open(self.folder / name, self.index.dtype, entry.num_tokens).sha256
            if actual != entry.sha256:
                raise ValueError(
                    f"{self.folder / name} has the sha256 {actual}, but {INDEX_NAME} says {entry.sha256}: it "
                    "was changed or damaged; prepare the data again"
                )


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
