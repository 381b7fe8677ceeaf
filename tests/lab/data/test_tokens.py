"""Token files and folders: what opens, and what is refused before anything is computed."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from merit_lab.data import Dataset, TokenFile
from merit_lab.data.index import FileEntry, Index
from merit_lab.data.tokens import hash_sample

TokenFileMaker = Callable[..., TokenFile]


def write_folder(folder: Path, *, index: bool = True, dtype: str = "uint16") -> Path:
    """A prepared folder with 1000 training and 100 validation tokens."""
    files = {}
    for name, count in (("train.bin", 1000), ("val.bin", 100)):
        content = (np.arange(count) % 256).astype(dtype).tobytes()
        (folder / name).write_bytes(content)
        files[name] = FileEntry(
            num_tokens=count,
            num_text_bytes=3 * count,
            num_documents=1,
            sha256=hashlib.sha256(content).hexdigest(),
        )
    if index:
        content = Index(
            tokenizer="bytes", vocab_size=256, end_of_text=None, dtype=dtype, recipe={}, files=files
        ).to_json()
        (folder / "dataset.json").write_text(content)
    return folder


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_prepared_folder_opens(tmp_path: Path, dtype: str) -> None:
    dataset = Dataset.open(write_folder(tmp_path, dtype=dtype))
    assert dataset.train.num_tokens == 1000
    assert dataset.validation.tokens.tolist() == list(range(100))
    assert dataset.validation.tokens.dtype == dtype
    assert (dataset.vocab_size, dataset.tokenizer, dataset.bytes_per_token) == (256, "bytes", 3.0)
    dataset.verify()
    dataset.train.check(256)
    with pytest.raises(ValueError, match="read-only"):
        dataset.train.tokens[0] = 1


def test_a_nanogpt_folder_opens(tmp_path: Path) -> None:
    dataset = Dataset.open(str(write_folder(tmp_path, index=False)))
    assert dataset.train.num_tokens == 1000
    assert (dataset.vocab_size, dataset.tokenizer, dataset.bytes_per_token) == (None, "unknown", None)
    with pytest.raises(ValueError, match="nothing to compare with"):
        dataset.verify()


def test_bytes_per_token_are_those_of_the_validation_text(tmp_path: Path) -> None:
    files = json.loads((write_folder(tmp_path) / "dataset.json").read_text())["files"]
    files["val.bin"]["num_text_bytes"] = 450
    edit_index(tmp_path, files=files)
    assert Dataset.open(tmp_path).bytes_per_token == 4.5


def test_the_fingerprint_depends_on_the_bytes(tmp_path: Path) -> None:
    """With or without an index; another byte changes the fingerprint."""
    write_folder(tmp_path)
    with_index = Dataset.open(tmp_path).fingerprint
    (tmp_path / "dataset.json").unlink()
    assert Dataset.open(tmp_path).fingerprint == with_index
    damage(tmp_path / "val.bin")
    assert Dataset.open(tmp_path).fingerprint != with_index


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


def test_verify_finds_a_changed_byte(tmp_path: Path) -> None:
    write_folder(tmp_path)
    damage(tmp_path / "train.bin")
    dataset = Dataset.open(tmp_path)
    with pytest.raises(ValueError, match=r"train.bin has the sha256 .* but dataset.json says .* changed"):
        dataset.verify()


def large_folder(folder: Path) -> dict[str, bytes]:
    """A prepared folder whose files are too large to be sampled as a whole; its files' bytes."""
    contents = {name: np.arange(400_000, dtype=np.uint16).tobytes() for name in ("train.bin", "val.bin")}
    files = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        files[name] = FileEntry(
            num_tokens=400_000,
            num_text_bytes=400_000,
            num_documents=1,
            sha256=hashlib.sha256(content).hexdigest(),
            sample_sha256=hash_sample(folder / name),
        )
    index = Index(
        tokenizer="bytes", vocab_size=65536, end_of_text=None, dtype="uint16", recipe={}, files=files
    )
    (folder / "dataset.json").write_text(index.to_json())
    return contents


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_file_that_was_replaced_does_not_open(tmp_path: Path, name: str) -> None:
    """With the same size, changed at the first byte, the last or everywhere, with any timestamps."""
    content = large_folder(tmp_path)[name]
    half = len(content) // 2
    assert half > 64 * 4096
    for changed in (content[::-1], b"x" + content[1:], content[:-1] + b"x", content[:half] + bytes(half)):
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name} was changed or damaged after it was prepared"):
            Dataset.open(tmp_path)
    (tmp_path / name).write_bytes(content)
    Dataset.open(tmp_path).verify()


def test_a_sample_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the file is larger than memory."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(1 << 42)
    monkeypatch.setattr("merit_lab.data.tokens.hash_file", lambda _: pytest.fail("all of it was read"))
    before = hash_sample(tmp_path / "large.bin")
    with (tmp_path / "large.bin").open("r+b") as file:
        file.seek((1 << 42) - 1)
        file.write(b"x")
    assert hash_sample(tmp_path / "large.bin") != before


def test_data_of_the_first_version_has_no_sample(tmp_path: Path) -> None:
    write_folder(tmp_path)
    index = json.loads((tmp_path / "dataset.json").read_text())
    for entry in index["files"].values():
        del entry["sample_sha256"]
    (tmp_path / "dataset.json").write_text(json.dumps({**index, "version": 1}))
    Dataset.open(tmp_path).verify()
    damage(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=r"train.bin has the sha256 .* but dataset.json says"):
        Dataset.open(tmp_path).verify()


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
@pytest.mark.parametrize(
    ("size", "with_index", "message"),
    [
        (99, True, "has 99 bytes, but .* was truncated or replaced"),
        (98, True, "has 98 bytes, but .* was truncated or replaced"),
        (99, False, "has 99 bytes, which is not a multiple of 2"),
        (0, True, "is empty"),
        (0, False, "is empty"),
        (None, True, "is missing"),
        (None, False, "is missing"),
    ],
)
def test_wrong_sizes(tmp_path: Path, name: str, size: int | None, with_index: bool, message: str) -> None:
    write_folder(tmp_path, index=with_index)
    path = tmp_path / name
    path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{name} {message}"):
        Dataset.open(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere; create it with `merit prepare`"):
        Dataset.open(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(ValueError, match=r"book\.txt is a file; .* `merit prepare text .*book\.txt`"):
        Dataset.open(tmp_path / "book.txt")


def test_foreign_token_files(tmp_path: Path) -> None:
    write_folder(tmp_path, index=False)
    with (tmp_path / "val.bin").open("wb") as file:
        np.save(file, np.arange(10, dtype=np.uint16))
    with pytest.raises(
        ValueError, match=r"val.bin is not a plain file of tokens but an array saved by numpy"
    ):
        Dataset.open(tmp_path)
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 100
    (tmp_path / "val.bin").write_bytes(header.tobytes() + bytes(200))
    with pytest.raises(ValueError, match=r"val.bin .* a shard of llm.c"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another"}, "was not written by `merit prepare`"),
        ({"version": 3}, "has format version 3; this merit-optim reads versions 1 and 2"),
        ({"files": {}}, "is damaged"),
        ({"files": {"train.bin": {"size": 3}}}, "is damaged"),
        ({"files": 3}, "is damaged"),
        ({"dtype": "float32"}, "is damaged .*dtype is 'float32'"),
        ({"fingerprint": "0"}, "is damaged .*fingerprint"),
    ],
)
def test_wrong_indices(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    edit_index(write_folder(tmp_path), **changes)
    with pytest.raises(ValueError, match=rf"dataset.json {message}"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x80"])
def test_an_invalid_index(tmp_path: Path, content: str) -> None:
    (write_folder(tmp_path) / "dataset.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"dataset.json (is not JSON|was not written)"):
        Dataset.open(tmp_path)


def test_check_names_file_position_and_token(
    token_file: TokenFileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("merit_lab.data.tokens._BLOCK", 64)
    tokens = token_file(300)
    tokens.check(300)
    with pytest.raises(ValueError, match=r"tokens.bin: token 199 is 199, but the vocabulary has 199 entries"):
        tokens.check(199)


def test_check_reads_nothing_if_every_token_fits(token_file: TokenFileMaker) -> None:
    tokens = token_file(70000)  # 0 to 65535, then from 0 again
    tokens.check(65536)
    with pytest.raises(ValueError, match="token 65535 is 65535, but the vocabulary has 65535"):
        tokens.check(65535)


def test_a_shard_of_real_text_opens(tmp_path: Path, shared_data: Path) -> None:
    """A shard published for nanoGPT-like training, as train.bin and val.bin."""
    import lzma

    for name, packed in (("train.bin", "val_wiki_a.u16.xz"), ("val.bin", "val_books.u16.xz")):
        (tmp_path / name).write_bytes(lzma.decompress((shared_data / packed).read_bytes()))
    dataset = Dataset.open(tmp_path)
    assert 370_000 < dataset.train.num_tokens < 380_000
    dataset.train.check(50257)
    with pytest.raises(ValueError, match="but the vocabulary has 50256 entries"):
        dataset.validation.check(50256)
