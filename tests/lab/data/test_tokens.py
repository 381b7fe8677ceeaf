"""Token files and folders: what opens, and what is refused before anything is computed."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merit_lab.data import Dataset, TokenFile
from merit_lab.data.tokens import FileEntry, Index, hash_sample


def write_folder(folder: Path, *, sizes: tuple[int, int] = (1000, 100), dtype: Any = "uint16") -> Path:
    """A prepared folder of training and validation tokens."""
    files = {}
    for name, count in zip(("train.bin", "val.bin"), sizes, strict=True):
        content = (np.arange(count) % 251).astype(dtype).tobytes()
        (folder / name).write_bytes(content)
        files[name] = FileEntry(
            num_tokens=count,
            num_text_bytes=3 * count if name == "train.bin" else 4 * count,
            num_documents=1,
            sha256=hashlib.sha256(content).hexdigest(),
            sample_sha256=hash_sample(folder / name),
        )
    index = Index(
        recipe={"tokenizer": "bytes"},
        tokenizer_sha256=None,
        vocab_size=256,
        end_of_text=None,
        dtype=dtype,
        files=files,
        position=None,
    )
    (folder / "dataset.json").write_text(index.to_json())
    return folder


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_prepared_folder_opens(tmp_path: Path, dtype: str) -> None:
    dataset = Dataset.open(write_folder(tmp_path, dtype=dtype))
    assert dataset.train.num_tokens == 1000
    assert dataset.validation.tokens.tolist() == list(range(100))
    assert dataset.validation.tokens.dtype == dtype
    assert (dataset.vocab_size, dataset.tokenizer) == (256, "bytes")
    assert dataset.bytes_per_token == 4.0, "of the validation text"
    dataset.verify()
    with pytest.raises(ValueError, match="read-only"):
        dataset.train.tokens[0] = 1


def test_a_nanogpt_folder_opens(tmp_path: Path) -> None:
    """Its fingerprint is that of the same bytes with an index, and changes with any of them."""
    with_index = Dataset.open(write_folder(tmp_path)).fingerprint
    (tmp_path / "dataset.json").unlink()
    dataset = Dataset.open(str(tmp_path))
    assert dataset.train.num_tokens == 1000
    assert (dataset.vocab_size, dataset.tokenizer, dataset.bytes_per_token) == (None, "unknown", None)
    assert dataset.fingerprint == with_index
    with pytest.raises(ValueError, match="nothing to compare with"):
        dataset.verify()
    (tmp_path / "val.bin").write_bytes(bytes(200))
    assert Dataset.open(tmp_path).fingerprint != with_index


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_file_that_was_replaced_does_not_open(tmp_path: Path, name: str) -> None:
    """With the same size, changed at the first byte, the last or everywhere; a byte inside is for verify."""
    write_folder(tmp_path, sizes=(400_000, 400_000))
    content = (tmp_path / name).read_bytes()
    half = len(content) // 2
    for changed in (content[::-1], b"x" + content[1:], content[:-1] + b"x", content[:half] + bytes(half)):
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name} was changed or damaged after it was prepared"):
            Dataset.open(tmp_path)
    (tmp_path / name).write_bytes(content[:5000] + b"x" + content[5001:])
    with pytest.raises(ValueError, match=rf"{name} has the sha256 .* but dataset.json says .* changed"):
        Dataset.open(tmp_path).verify()


@pytest.mark.parametrize(
    ("name", "content", "with_index", "message"),
    [
        ("train.bin", bytes(98), True, "was changed or damaged .* with --overwrite"),
        ("val.bin", None, True, "is missing"),
        ("val.bin", None, False, "is missing"),
        ("train.bin", bytes(99), False, "has 99 bytes, which are no tokens of uint16"),
        ("train.bin", b"", False, "has 0 bytes"),
    ],
)
def test_wrong_files(
    tmp_path: Path, name: str, content: bytes | None, with_index: bool, message: str
) -> None:
    write_folder(tmp_path)
    if not with_index:
        (tmp_path / "dataset.json").unlink()
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} {message}"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"merit-optim tokens', '"another'),
        lambda text: text.replace("1000", '"many"'),
        lambda text: text.replace("1000", "9" * 400),
        lambda text: text.replace('"vocab_size": 256', '"vocab_size": 257'),
        lambda text: text.replace('"tokenizer": "bytes"', '"tokenizer": "cytes"'),
        lambda text: text.replace('"position": null', '"position": 3'),
        lambda text: text.replace('"position": null', f'"position": {"[" * 100_000}{"]" * 100_000}'),
        lambda text: json.dumps({**json.loads(text), "files": 3}),
        lambda text: text[:-5],
        lambda _: "[]",
        lambda _: "\x80",
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = write_folder(tmp_path) / "dataset.json"
    before = path.read_text()
    path.write_bytes(damage(before).encode("latin-1"))
    assert path.read_text(encoding="latin-1") != before
    with pytest.raises(ValueError, match=r"dataset.json is damaged, or .*: prepare the data again"):
        Dataset.open(tmp_path)


def test_check_names_file_position_and_token(tmp_path: Path) -> None:
    (np.arange(70_000) % 300).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = TokenFile.open(tmp_path / "tokens.bin")
    tokens.check(300)
    with pytest.raises(ValueError, match=r"tokens.bin: token 299 is 299, .* vocabulary has 299 entr"):
        tokens.check(299)
