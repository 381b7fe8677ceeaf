"""Preparing: the right tokens, all or nothing, and the same bytes after any interruption."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merit_lab.data import Dataset
from merit_lab.data import prepare as preparing
from merit_lab.data.corpora import Enwik8, text_files
from merit_lab.data.parts import Counts, Parts
from merit_lab.data.pieces import TextCorpus
from merit_lab.data.prepare import prepare
from merit_lab.data.tokens import hash_file

WORKER = Path(__file__).with_name("kill_worker.py")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"line %d of some text, %d\n" % (number, number**2) for number in range(2000)))
    return path


@pytest.fixture
def corpus(text: Path) -> TextCorpus:
    return text_files([text], 0.1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def runs(corpus: TextCorpus, split: str) -> list[bytes]:
    """The runs of text of a split, between which the text does not continue."""
    texts = [b""]
    for piece in corpus.pieces():
        if piece.split == split:
            texts[-1] += piece.text
            if piece.ends:
                texts.append(b"")
    return texts[:-1]


def test_bytes(corpus: TextCorpus, tmp_path: Path) -> None:
    index = prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    dataset = Dataset.open(tmp_path / "data")
    assert dataset.index == index
    for file, split in ((dataset.train, "train"), (dataset.validation, "val")):
        wanted = b"".join(runs(corpus, split))
        assert file.tokens.astype(np.uint8).tobytes() == wanted
        assert index.files[f"{split}.bin"].num_text_bytes == len(wanted)
        assert index.files[f"{split}.bin"].num_documents == len(runs(corpus, split))
    dataset.verify()
    assert sorted(contents(tmp_path / "data")) == ["dataset.json", "train.bin", "val.bin"]


@pytest.mark.parametrize("size", [300, 70_000])
def test_a_trained_bpe(
    corpus: TextCorpus, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained only on training text, saved with the data, and ended by the end-of-text token."""
    from tokenizers import Tokenizer

    trained_on: list[bytes] = []
    train = preparing.tokenizers.train_bpe
    monkeypatch.setattr(
        preparing.tokenizers,
        "train_bpe",
        lambda texts, size: train(trained_on.extend(texts) or trained_on, size),
    )
    index = prepare(corpus, tmp_path / "data", tokenizer=f"bpe-{size}", part_bytes=10_000)
    assert b"".join(trained_on) == b"".join(runs(corpus, "train"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "data" / "tokenizer.json"))
    assert index.vocab_size == tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|endoftext|>")
    assert index.end_of_text == end
    dataset = Dataset.open(tmp_path / "data")
    assert dataset.train.tokens.dtype == ("uint16" if size == 300 else "uint32")
    for file, split in ((dataset.train, "train"), (dataset.validation, "val")):
        wanted = [id_ for text in runs(corpus, split) for id_ in [*tokenizer.encode(text.decode()).ids, end]]
        assert file.tokens.tolist() == wanted
        file.check(index.vocab_size)


def test_an_external_tokenizer(corpus: TextCorpus, tmp_path: Path) -> None:
    """It is saved with the data, identified by its hash, and its end-of-text token ends documents."""
    from merit_lab.data.tokenizer import train_bpe

    path = tmp_path / "theirs.json"
    path.write_text(train_bpe([b"some text of others"], 270).replace("<|endoftext|>", "</s>"))
    folder = tmp_path / "data"
    with pytest.raises(ValueError, match="choose one that it has with --end-of-text"):
        prepare(corpus, folder, tokenizer=str(path))
    index = prepare(corpus, folder, tokenizer=str(path), end_of_text="</s>", part_bytes=10_000)
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    assert index.tokenizer == f"file-{hash_file(path)[:16]}"
    library = preparing.tokenizers.read_tokenizer(path)
    assert index.end_of_text == library.token_to_id("</s>")
    dataset = Dataset.open(folder)
    wanted = [
        token
        for text in runs(corpus, "train")
        for token in [*library.encode(text.decode()).ids, index.end_of_text]
    ]
    assert dataset.train.tokens.tolist() == wanted
    assert (dataset.vocab_size, dataset.end_of_text) == (library.get_vocab_size(), index.end_of_text)
    # The same file under another name is the same; another file, or a changed copy, is not.
    moved = path.rename(tmp_path / "moved.json")
    assert prepare(corpus, folder, tokenizer=str(moved), end_of_text="</s>") == index
    (folder / "tokenizer.json").write_text(moved.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer.json was changed: it is not file-"):
        prepare(corpus, folder, tokenizer=str(moved), end_of_text="</s>")
    moved.write_text(moved.read_text() + " ")
    with pytest.raises(ValueError, match=r"data of another recipe, with tokenizer file-"):
        prepare(corpus, folder, tokenizer=str(moved), end_of_text="</s>")


def test_gpt2_on_wikipedia_is_tiktokens(tmp_path: Path, shared_data: Path) -> None:
    """Two megabytes of enwik8, in many parts, against tiktoken on the whole."""
    import lzma

    from merit_lab.data.tokenizer import Gpt2

    with lzma.open(shared_data / "enwik8.xz") as file:
        (tmp_path / "enwik8").write_bytes(file.read(2_000_000))
    corpus = text_files([tmp_path / "enwik8"], 0.02)
    vocabulary = shared_data / "gpt2_bpe"
    prepare(corpus, tmp_path / "data", tokenizer="gpt2", gpt2_vocabulary=vocabulary, part_bytes=100_000)
    dataset = Dataset.open(tmp_path / "data")
    gpt2 = Gpt2(vocabulary)
    for file, split in ((dataset.train, "train"), (dataset.validation, "val")):
        wanted = [np.append(tokens, 50256) for tokens in gpt2.encode(runs(corpus, split))]
        assert np.array_equal(file.tokens, np.concatenate(wanted))
    dataset.train.check(50257)


def test_a_third_file_for_enwik8(tmp_path: Path, text: Path) -> None:
    size = text.stat().st_size
    index = prepare(Enwik8(text, (size - 200, 100, 100)), tmp_path / "data", tokenizer="bytes")
    assert {name: entry.num_tokens for name, entry in index.files.items()} == {
        "train.bin": size - 200,
        "val.bin": 100,
        "test.bin": 100,
    }
    Dataset.open(tmp_path / "data").verify()
    (tmp_path / "data" / "test.bin").write_bytes(bytes(200))
    with pytest.raises(ValueError, match=r"test.bin has the sha256"):
        Dataset.open(tmp_path / "data").verify()
    (tmp_path / "data" / "test.bin").unlink()
    with pytest.raises(ValueError, match=r"test.bin is missing"):
        Dataset.open(tmp_path / "data").verify()


@pytest.mark.parametrize(("tokenizer", "num_kills"), [("bytes", 20), ("bpe-300", 4), ("bytes-over-bpe", 2)])
def test_killed_at_any_moment_and_resumed(tmp_path: Path, tokenizer: str, num_kills: int) -> None:
    """SIGKILL at many lines of the code; the next call finishes with the same bytes.

    The last case replaces older data, which are whole until the new ones are.
    """
    finished = subprocess.run(
        [sys.executable, WORKER, tmp_path, tokenizer, str(num_kills)],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) >= num_kills


class Stopped(BaseException):
    """Stops a call in the middle."""


def stop_after(monkeypatch: pytest.MonkeyPatch, num_parts: int) -> None:
    append = Parts.append
    left = num_parts

    def append_some(*arguments: Any) -> None:
        nonlocal left
        if left == 0:
            raise Stopped
        left -= 1
        append(*arguments)

    monkeypatch.setattr(Parts, "append", append_some)


def test_finished_parts_are_not_repeated(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            prepare(corpus, folder, tokenizer="bytes", part_bytes=10_000)
    assert [path.name for path in folder.iterdir()] == ["partial"]
    encoded: list[bytes] = []
    encode = preparing.tokenizers.Bytes.encode
    monkeypatch.setattr(
        preparing.tokenizers.Bytes, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    prepare(corpus, folder, tokenizer="bytes", part_bytes=10_000)
    assert b"".join(encoded) == b"".join(piece.text for piece in corpus.pieces())[-sum(map(len, encoded)) :]
    assert 0 < sum(map(len, encoded)) <= corpus.total - 30_000


def test_bytes_after_the_last_journal_entry_are_cut_off(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was half written, and an incomplete journal line."""
    prepare(corpus, tmp_path / "whole", tokenizer="bytes", part_bytes=10_000)
    partial = tmp_path / "data" / "partial"
    for num_parts in (2, 1):
        with monkeypatch.context() as patch:
            stop_after(patch, num_parts)
            with pytest.raises(Stopped):
                prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
        for name, more in (
            ("train.bin", b"half a p"),
            ("val.bin", b"x"),
            ("journal.jsonl", b'{"state": 4, '),
        ):
            with (partial / name).open("ab") as file:
                file.write(more)
    prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_missing_part_is_detected(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    train = tmp_path / "data" / "partial" / "train.bin"
    train.write_bytes(train.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train.bin has \d+ bytes, but the journal says \d+"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")


def test_a_full_disk(text: Path, tmp_path: Path) -> None:
    """Files may not exceed a limit; without the limit the same call finishes."""
    program = f"""
import resource, sys
from pathlib import Path
from merit_lab.data.corpora import text_files
from merit_lab.data.prepare import prepare
from merit_lab.data.tokens import hash_file
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
corpus = text_files([Path({str(text)!r})], 0.1)
prepare(corpus, Path({str(tmp_path / "data")!r}), tokenizer="bytes", part_bytes=10_000)
"""
    failed = subprocess.run(
        [sys.executable, "-B", "-c", program], check=False, capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 1
    assert "partial failed: File too large. Earlier parts are kept" in failed.stderr
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["partial"]
    assert len((tmp_path / "data" / "partial" / "journal.jsonl").read_text().splitlines()) > 2
    corpus = text_files([text], 0.1)
    prepare(corpus, tmp_path / "data", tokenizer="bytes")
    prepare(corpus, tmp_path / "whole", tokenizer="bytes")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_finished_data_is_left_alone(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = prepare(corpus, tmp_path / "data", tokenizer="bytes")
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        assert prepare(corpus, tmp_path / "data", tokenizer="bytes") == index
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True)
    # The old files stay until the new ones are complete.
    Dataset.open(tmp_path / "data").verify()
    (tmp_path / "data" / "train.bin").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"train.bin has 7 bytes"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")
    assert prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True) == index
    Dataset.open(tmp_path / "data").verify()


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "dataset.json"])
def test_damaged_data_is_not_accepted(corpus: TextCorpus, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    index = prepare(corpus, folder, tokenizer="bpe-300")
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] + b"~")
    if name == "tokenizer.json":  # its hash is not kept
        (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} .*\(--overwrite recreates everything\)"):
        prepare(corpus, folder, tokenizer="bpe-300")
    assert prepare(corpus, folder, tokenizer="bpe-300", overwrite=True) == index
    assert (folder / name).read_bytes() == content


def test_overwriting_recreates_the_files_after_a_stop_at_the_very_end(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: Parts) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "remove", stop)
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bytes")
    train = tmp_path / "data" / "train.bin"
    undamaged = train.read_bytes()
    train.write_bytes(bytes(len(undamaged)))
    prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True)
    assert train.read_bytes() == undamaged
    Dataset.open(tmp_path / "data").verify()


def test_other_data_is_refused_unless_overwritten(corpus: TextCorpus, text: Path, tmp_path: Path) -> None:
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
    Dataset.open(folder).verify()


def test_other_files_are_refused_unless_overwritten(corpus: TextCorpus, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"precious")
    with pytest.raises(ValueError, match=r"train.bin was not written by `merit prepare`; .*--overwrite"):
        prepare(corpus, tmp_path, tokenizer="bytes")
    assert (tmp_path / "train.bin").read_bytes() == b"precious"
    prepare(corpus, tmp_path, tokenizer="bytes", overwrite=True)
    Dataset.open(tmp_path).verify()


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "test.bin", "tokenizer.json"])
def test_a_partial_folder_does_not_make_other_files_ours(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not an empty one, nor one of ours, nor one with a broken link."""
    (tmp_path / "data" / "partial").mkdir(parents=True)
    precious = tmp_path / "data" / name
    precious.write_bytes(b"precious")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name} was not written by `merit prepare`; .*--overwrite"):
            prepare(corpus, tmp_path / "data", tokenizer="bytes")
    precious.unlink()
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    precious.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=rf"{name} was not written by `merit prepare`"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")
    precious.unlink()
    prepare(corpus, tmp_path / "data", tokenizer="bytes")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.txt": "precious"},
        {"train.bin": "precious"},
        {"train.bin": "precious", "journal.jsonl": ""},
        {"journal.jsonl": "precious"},
        {"journal.jsonl": '{"entry": "precious"}\n'},
        {"journal.jsonl": '{"recipe": {}, "dtype": "uint16"}\n', "thesis.txt": "precious"},
    ],
    ids="-".join,
)
def test_another_partial_folder_is_refused(
    corpus: TextCorpus, tmp_path: Path, files: dict[str, str], overwrite: bool
) -> None:
    partial = tmp_path / "data" / "partial"
    partial.mkdir(parents=True)
    for name, content in files.items():
        (partial / name).write_text(content)
    with pytest.raises(ValueError, match=r"partial was not written by `merit prepare`.* another --out"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=overwrite)
    assert {path.name: path.read_text() for path in partial.iterdir()} == files


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("link", ["partial", "partial/journal.jsonl", "partial/train.bin"])
def test_links_are_not_followed(corpus: TextCorpus, tmp_path: Path, link: str, overwrite: bool) -> None:
    """The target itself would be accepted as ours."""
    target = tmp_path / "elsewhere"
    if link == "partial":
        target.mkdir()
    else:
        target.write_bytes(b"")
    path = tmp_path / "data" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    with pytest.raises(ValueError, match=r"partial was not written by `merit prepare`.* another --out"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=overwrite)
    assert path.is_symlink()
    assert not (list(target.iterdir()) if target.is_dir() else target.read_bytes())


def test_a_link_named_like_the_unfinished_index_is_replaced(corpus: TextCorpus, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json.tmp").symlink_to(tmp_path / "precious")
    prepare(corpus, tmp_path / "data", tokenizer="bytes")
    assert (tmp_path / "precious").read_text() == "precious"
    Dataset.open(tmp_path / "data").verify()


def test_unfinished_files_of_another_recipe_are_refused_unless_overwritten(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bytes", part_bytes=10_000)
    with pytest.raises(ValueError, match=r"partial holds unfinished files of another recipe"):
        prepare(corpus, tmp_path / "data", tokenizer="bpe-300")
    prepare(corpus, tmp_path / "data", tokenizer="bpe-300", overwrite=True)
    assert Dataset.open(tmp_path / "data").tokenizer == "bpe-300"


def test_a_call_that_wrote_no_part_is_ignored(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 0)
        with pytest.raises(Stopped):
            prepare(corpus, tmp_path / "data", tokenizer="bpe-300")
    prepare(corpus, tmp_path / "data", tokenizer="bytes")
    assert sorted(contents(tmp_path / "data")) == ["dataset.json", "train.bin", "val.bin"]


def test_one_process_at_a_time(corpus: TextCorpus, tmp_path: Path) -> None:
    with (
        Parts(tmp_path / "data" / "partial", splits=("train",), dtype="uint16", recipe={}, overwrite=False),
        pytest.raises(ValueError, match=r"another process is preparing .*data; wait for it"),
    ):
        prepare(corpus, tmp_path / "data", tokenizer="bytes", overwrite=True)


def test_a_damaged_journal(corpus: TextCorpus, tmp_path: Path) -> None:
    (tmp_path / "data" / "partial").mkdir(parents=True)
    (tmp_path / "data" / "partial" / "journal.jsonl").write_text('{"recipe": {}, nonsense\n')
    with pytest.raises(ValueError, match=r"journal.jsonl is damaged .*; remove the folder"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")


@pytest.mark.parametrize("tokenizer", ["bpe-300", "gpt2"])
def test_text_that_is_not_utf8(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, text: Path
) -> None:
    from merit_lab.data.tokenizer import FromFile, train_bpe

    bad = tmp_path / "bad"
    bad.write_bytes(b"good text here " * 2000 + b"bad: \xff\xfe " + b"good text here " * 2000)
    if tokenizer == "gpt2":  # one that needs no vocabulary stands in
        (tmp_path / "bpe.json").write_text(train_bpe([text.read_bytes()], 300))
        monkeypatch.setattr(preparing.tokenizers, "Gpt2", lambda _: FromFile(tmp_path / "bpe.json"))
    with pytest.raises(ValueError, match=r"bad is not UTF-8 text .* near .*bad: .*xff.* tokenizer 'bytes'"):
        prepare(text_files([bad], 0.01), tmp_path / "data", tokenizer=tokenizer)


def test_a_split_without_text_is_an_error(
    corpus: TextCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(corpus), "splits", ("train", "val", "test"))
    with pytest.raises(ValueError, match=r"the corpus has no text for test.bin"):
        prepare(corpus, tmp_path / "data", tokenizer="bytes")
    assert not (tmp_path / "data" / "dataset.json").exists()


def test_the_recipe_determines_the_bytes(corpus: TextCorpus, tmp_path: Path) -> None:
    for name, part_bytes in (("one", 1), ("two", 10**9)):
        prepare(corpus, tmp_path / name, tokenizer="bpe-300", part_bytes=part_bytes)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    index = json.loads((tmp_path / "one" / "dataset.json").read_text())
    assert index["recipe"] == {"corpus": corpus.recipe, "tokenizer": "bpe-300"}
    assert index["fingerprint"] == Dataset.open(tmp_path / "one").fingerprint


def test_counts_add_up() -> None:
    one = Counts(num_tokens=1, num_text_bytes=2, num_documents=3)
    assert one.plus(one) == Counts(num_tokens=2, num_text_bytes=4, num_documents=6)
