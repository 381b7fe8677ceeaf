"""dataset.json: the index of a folder of token files, which detects wrong or truncated files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from merit_lab.checks import check_choice

INDEX_NAME = "dataset.json"
FORMAT = "merit-optim tokens"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, 2)  # 1 has no samples
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One token file: its length, the amount of text, its hash, and the hash of a sample of its bytes."""

    num_tokens: int
    num_text_bytes: int
    num_documents: int
    sha256: str
    sample_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of dataset.json.

    ``recipe`` determines the files: corpus, tokenizer, share of validation text. Two folders with the same
    recipe hold the same bytes.
    """

    tokenizer: str
    vocab_size: int
    end_of_text: int | None
    dtype: str
    recipe: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the data, independent of names and folders."""
        return fingerprint(self.files["train.bin"].sha256, self.files["val.bin"].sha256)

    def to_json(self) -> str:
        """Return the text of dataset.json."""
        content = {"format": FORMAT, "version": FORMAT_VERSION, "fingerprint": self.fingerprint}
        return json.dumps({**content, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read and check a dataset.json."""
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); prepare the data again") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(
                f"{path} was not written by `merit prepare`; to use the token files beside it as they "
                "are, remove or rename it"
            )
        if content.get("version") not in _READ_VERSIONS:
            raise ValueError(
                f"{path} has format version {content.get('version')!r}; this merit-optim reads versions "
                f"{' and '.join(map(str, _READ_VERSIONS))}. Prepare the data again, or use the version "
                "that wrote it"
            )
        try:
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            fields = ("tokenizer", "vocab_size", "end_of_text", "dtype", "recipe")
            index = cls(files=files, **{name: content[name] for name in fields})
            check_choice("dtype", index.dtype, DTYPES)
            if index.fingerprint != content["fingerprint"]:
                raise ValueError("its fingerprint does not match its hashes")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error!r}); prepare the data again") from error
        return index


def fingerprint(train_sha256: str, validation_sha256: str) -> str:
    """Return a sha256 over the hashes of the training and the validation file."""
    return hashlib.sha256(f"train.bin {train_sha256}\nval.bin {validation_sha256}\n".encode()).hexdigest()
