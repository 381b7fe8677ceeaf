"""Preparing: the right tokens, all or nothing, and the same bytes after any interruption."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from merit_lab.data import Dataset
from merit_lab.data import prepare as preparing
from merit_lab.data.corpora import Corpus, Enwik8, text_files
from merit_lab.data.parts import Parts, locked
from merit_lab.data.prepare import prepare
from merit_lab.data.tokenizer import FromFile, read_tokenizer, train_bpe
from merit_lab.data.tokens import hash_file

WORKER = Path(__file__).with_name("kill_worker.py")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Lines in 20 documents."""
    lines = [b"line %d of some text, %d\n" % (number, number**2) for number in range(2000)]
    path = tmp_path / "text.jsonl"
    documents = [b"".join(lines[begin : begin + 100]).decode() for begin in range(0, 2000, 100)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


@pytest.fixture
def corpus(text: Path) -> Corpus:
    return text_files([text], 0.1)


@pytest.fixture
def stop(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Prepares the corpus, and stops in the middle."""

    def stopped(folder: Path, num_parts: int, tokenizer: str = "bytes") -> None:
        append, left = Parts.append, num_parts

        def append_some(*arguments: Any) -> None:
            nonlocal left
            if left == 0:
                raise Stopped
            left -= 1
            append(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Parts, "append", append_some)
            with pytest.raises(Stopped):
                prepare(corpus, folder, tokenizer=tokenizer, part_bytes=10_000)

    return stopped


class Stopped(BaseException):
    """Stops a call in the middle."""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents(corpus: Corpus, split: str) -> list[bytes]:
    """The documents of a split."""
    texts = [b""]
    for piece in corpus.pieces(corpus.begin):
        if piece.split == split:
            texts[-1] += piece.text
            if piece.ends:
                texts.append(b"")
    return texts if texts[-1] else texts[:-1]


def assert_tokens(corpus: Corpus, folder: Path, encode: Callable[[bytes], list[int]], end: list[int]) -> None:
    """The files hold the tokens of the corpus's documents, each with the end of text after it."""
    dataset = Dataset.open(folder)
    dataset.verify()
    assert dataset.index is not None
    for file, split in ((dataset.train, "train"), (dataset.validation, "val")):
        texts = documents(corpus, split)
        assert file.tokens.tolist() == [token for text in texts for token in [*encode(text), *end]]
        entry = dataset.index.files[f"{split}.bin"]
        assert (entry.num_documents, entry.num_text_bytes) == (len(texts), sum(map(len, texts)))


def test_bytes(corpus: Corpus, tmp_path: Path) -> None:
    index = prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    assert Dataset.open(tmp_path / "data").index == index
    assert_tokens(corpus, tmp_path / "data", list, [])
    assert sorted(contents(tmp_path / "data")) == ["dataset.json", "train.bin", "val.bin"]


def test_a_trained_bpe(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained only on training text, saved with the data, and ended by the end-of-text token."""
    trained_on: list[bytes] = []
    monkeypatch.setattr(
        preparing,
        "train_bpe",
        lambda texts, size: train_bpe(trained_on.extend(texts) or trained_on, size),
    )
    index = prepare(corpus, tmp_path / "data", tokenizer="bpe-300", part_bytes=10_000)
    assert trained_on == documents(corpus, "train")
    tokenizer = read_tokenizer(tmp_path / "data" / "tokenizer.json")
    assert (index.vocab_size, index.dtype) == (tokenizer.get_vocab_size(), "uint16")
    assert index.end_of_text == tokenizer.token_to_id("<|endoftext|>")
    assert_tokens(
        corpus, tmp_path / "data", lambda text: tokenizer.encode(text.decode()).ids, [index.end_of_text]
    )


def test_an_external_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    """It is saved with the data, identified by its hash, and its end-of-text token ends documents."""
    path = tmp_path / "theirs.json"
    theirs = json.loads(train_bpe([b"some text of others"], 270).replace("<|endoftext|>", "</s>"))
    theirs["model"]["vocab"]["far away"] = 70_000
    path.write_text(json.dumps(theirs))
    folder = tmp_path / "data"
    with pytest.raises(ValueError, match="choose one that it has with --end-of-text"):
        prepare(corpus, folder, tokenizer=str(path))
    index = prepare(corpus, folder, tokenizer=str(path), end_of_text="</s>", part_bytes=10_000)
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert (index.tokenizer, index.dtype) == (f"file-{hash_file(path)[:16]}", "uint32")
    library = read_tokenizer(path)
    assert index.end_of_text == library.token_to_id("</s>")
    assert_tokens(corpus, folder, lambda text: library.encode(text.decode()).ids, [index.end_of_text])
    # The same file under another name is the same; another is not.
    moved = path.rename(tmp_path / "moved.json")
    assert prepare(corpus, folder, tokenizer=str(moved), end_of_text="</s>") == index
    moved.write_text(moved.read_text() + " ")
    with pytest.raises(ValueError, match=r"data of another recipe, with tokenizer file-"):
        prepare(corpus, folder, tokenizer=str(moved), end_of_text="</s>")


@pytest.mark.parametrize("tokenizer", ["bytes", pytest.param("bytes-over-bpe", marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_resumed(tmp_path: Path, tokenizer: str) -> None:
    """SIGKILL before every change of a file; nothing unfinished opens, and the same bytes come out.

    The last case replaces older data.
    """
    finished = subprocess.run(
        [sys.executable, WORKER, tmp_path, tokenizer],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) > 20


def test_finished_parts_are_not_repeated(
    corpus: Corpus, stop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were written after the last entry are cut off; until the end nothing opens."""
    folder = tmp_path / "data"
    prepare(corpus, tmp_path / "whole", tokenizer="bytes")
    stop(folder, 3)
    for name in ("train.bin", "val.bin"):
        with (folder / name).open("ab") as file:
            file.write(b"half a p")
    with pytest.raises(ValueError, match="data is not complete: the command that prepares it continues"):
        Dataset.open(folder)
    encoded: list[bytes] = []
    encode = preparing.Bytes.encode
    monkeypatch.setattr(
        preparing.Bytes, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    prepare(corpus, folder, tokenizer="bytes", part_bytes=10_000)
    assert 0 < sum(map(len, encoded)) <= corpus.total - 30_000
    assert contents(folder) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "num_places"), [("dataset.json", 40), ("train.bin", 3), ("val.bin", 3), ("tokenizer.json", 3)]
)
def test_a_flipped_bit_of_unfinished_files_is_noticed(
    corpus: Corpus, stop: Callable[..., None], tmp_path: Path, name: str, num_places: int
) -> None:
    """Wherever it is; and the way out works."""
    prepare(corpus, tmp_path / "whole", tokenizer="bpe-300")
    stop(tmp_path / "stopped", 4, "bpe-300")
    content = (tmp_path / "stopped" / name).read_bytes()
    for number in range(num_places):
        folder = shutil.copytree(tmp_path / "stopped", tmp_path / f"{number}")
        changed = bytearray(content)
        changed[number * (len(content) - 1) // (num_places - 1)] ^= 1 << number % 7
        (folder / name).write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name} .* damaged.*--overwrite"):
            prepare(corpus, folder, tokenizer="bpe-300", part_bytes=10_000)
    prepare(corpus, folder, tokenizer="bpe-300", overwrite=True)
    assert contents(folder) == contents(tmp_path / "whole")


def test_text_that_does_not_arrive_is_noticed(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals of what was read and what was tokenized are compared."""
    pieces = list(corpus.pieces(0))
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "pieces", lambda _: iter(pieces[:7] + pieces[8:]))
        with pytest.raises(ValueError, match=rf"\d+ of {corpus.total} bytes of text are in the token files"):
            prepare(corpus, tmp_path / "data", tokenizer="bytes")
    assert prepare(corpus, tmp_path / "data", tokenizer="bytes").is_complete


def test_a_full_disk(
    corpus: Corpus, tmp_path: Path, no_file_larger_than: Callable[[int], AbstractContextManager[None]]
) -> None:
    """Files may not exceed a limit; without the limit the same call finishes."""
    with no_file_larger_than(50_000), pytest.raises(OSError, match=r"too large\. Earlier parts are kept"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    assert (tmp_path / "data" / "train.bin").stat().st_size > 10_000
    prepare(corpus, tmp_path / "data", tokenizer="bytes")
    prepare(corpus, tmp_path / "whole", tokenizer="bytes")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "dataset.json"])
def test_finished_data_is_kept_and_damaged_data_refused(corpus: Corpus, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    index = prepare(corpus, folder, tokenizer="bpe-300")
    before = (folder / "train.bin").stat().st_mtime_ns
    assert prepare(corpus, folder, tokenizer="bpe-300") == index
    assert (folder / "train.bin").stat().st_mtime_ns == before
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + b"~")
    with pytest.raises(ValueError, match=rf"{name} .*damaged.*--overwrite"):
        prepare(corpus, folder, tokenizer="bpe-300")
    assert prepare(corpus, folder, tokenizer="bpe-300", overwrite=True) == index
    assert (folder / name).read_bytes() == content


def test_other_data_is_refused_unless_overwritten(
    corpus: Corpus, text: Path, stop: Callable[..., None], tmp_path: Path
) -> None:
    """Finished or not; nothing of it is left."""
    folder = tmp_path / "data"
    prepare(corpus, folder, tokenizer="bpe-300")
    recipes = "with tokenizer bpe-300, not tokenizer bytes"
    with pytest.raises(ValueError, match=rf"data holds data of another recipe, {recipes};.*--overwrite"):
        prepare(corpus, folder, tokenizer="bytes")
    size = text.stat().st_size
    prepare(Enwik8(text, (size - 200, 100, 100)), folder, tokenizer="bytes", overwrite=True)
    assert sorted(contents(folder)) == ["dataset.json", "test.bin", "train.bin", "val.bin"]
    prepare(corpus, folder, tokenizer="bytes", overwrite=True)
    assert sorted(contents(folder)) == ["dataset.json", "train.bin", "val.bin"]
    stop(tmp_path / "stopped", 2)
    with pytest.raises(ValueError, match=r"stopped holds data of another recipe"):
        prepare(corpus, tmp_path / "stopped", tokenizer="bpe-300")
    prepare(corpus, tmp_path / "stopped", tokenizer="bpe-300", overwrite=True)
    assert Dataset.open(tmp_path / "stopped").tokenizer == "bpe-300"


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "tokenizer.json"])
def test_files_that_are_not_ours_are_kept(
    corpus: Corpus, stop: Callable[..., None], tmp_path: Path, name: str
) -> None:
    """Also a broken link, and the target of a link that took the place of an unfinished file."""
    precious = tmp_path / "data" / name
    precious.parent.mkdir()
    for make in (
        lambda: precious.write_bytes(b"precious"),
        lambda: precious.symlink_to(tmp_path / "nowhere"),
    ):
        make()
        with pytest.raises(ValueError, match=rf"{name} was not written by `merit prepare`; .*--overwrite"):
            prepare(corpus, tmp_path / "data", tokenizer="bytes")
        assert precious.is_symlink() or precious.read_bytes() == b"precious"
        precious.unlink()
    stop(tmp_path / "data", 2)
    (tmp_path / "target").write_bytes(b"precious" * 10_000)
    (tmp_path / "data" / "train.bin").unlink()
    (tmp_path / "data" / "train.bin").symlink_to(tmp_path / "target")
    with pytest.raises(ValueError, match=r"train.bin does not hold what was written"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")
    prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True)
    assert (tmp_path / "target").read_bytes() == b"precious" * 10_000


def test_one_process_at_a_time(corpus: Corpus, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "data"),
        pytest.raises(ValueError, match=r"another process is preparing .*data; wait for it"),
    ):
        prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True)
    assert not (tmp_path / "data").exists()


def test_text_that_is_not_utf8(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad"
    bad.write_bytes(b"good text here " * 2000 + b"bad: \xff\xfe " + b"good text here " * 2000)
    (tmp_path / "bpe.json").write_text(train_bpe([text.read_bytes()], 300))
    monkeypatch.setattr(preparing, "Gpt2", lambda _: FromFile(read_tokenizer(tmp_path / "bpe.json")))
    for tokenizer in ("bpe-300", "gpt2"):  # noticed in training, and in encoding
        with pytest.raises(ValueError, match=r"bad is not UTF-8 text .*xff.* tokenizer 'bytes'"):
            prepare(text_files([bad], 0.01), tmp_path / "data", tokenizer=tokenizer)
