"""Corpora: a fixed order, whole documents for validation, nanoGPT's split, and changed files are detected."""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merit_lab.data import corpora
from merit_lab.data.corpora import (
    Corpus,
    Enwik8,
    Hub,
    Piece,
    c4,
    demo,
    embedded,
    nanogpt_validation,
    openwebtext,
    text_files,
)


def random_words(count: int, seed: int = 0) -> bytes:
    """Text without repetitions."""
    return b"".join(
        hashlib.md5(b"%d %d" % (seed, number)).hexdigest().encode() + b" " for number in range(count)
    )


def pieces_of(corpus: Corpus) -> list[Piece]:
    return list(corpus.pieces(corpus.begin))


def split_text(pieces: Iterable[Piece], split: str) -> bytes:
    """A split's text, with a mark where a document ends."""
    return b"".join(piece.text + b"|" * piece.ends for piece in pieces if piece.split == split)


def assert_resumes_anywhere(make: Callable[[], Corpus]) -> None:
    corpus = make()
    everything, positions = [], []
    for piece in corpus.pieces(corpus.begin):
        everything.append(piece)
        positions.append(json.loads(json.dumps(corpus.position())))
    for number, position in enumerate(positions, 1):
        assert list(make().pieces(position)) == everything[number:]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for number, size in enumerate((3000, 1, 8000)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(random_words(size, number))
    return paths


def write_lines(path: Path, texts: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(json.dumps({"text": text.decode()}).encode() + b"\n" for text in texts))
    return path


@settings(max_examples=30)
@given(share=st.floats(0.001, 0.6), seed=st.integers(0, 100), sizes=st.lists(st.integers(1, 300), min_size=2))
def test_the_share_is_exact_to_a_document(
    tmp_path_factory: pytest.TempPathFactory, share: float, seed: int, sizes: list[int]
) -> None:
    """No document is in two files or counted twice, and no other document would bring it closer."""
    texts = [random_words(size, seed + number) for number, size in enumerate(sizes)]
    path = write_lines(tmp_path_factory.getbasetemp() / "docs.jsonl", texts)
    try:
        corpus = text_files([path], share)
    except ValueError:  # nothing is left to train on
        return
    pieces = pieces_of(corpus)
    sides = {split: split_text(pieces, split).split(b"|")[:-1] for split in ("train", "val")}
    assert sorted(sides["train"] + sides["val"]) == sorted(texts)
    assert [text for text in texts if text in sides["train"]] == sides["train"]
    validation = sum(map(len, sides["val"]))
    wanted = share * corpus.total
    assert all(abs(validation + len(text) - wanted) >= abs(validation - wanted) for text in sides["train"])


@pytest.mark.parametrize("share", [0.0001, 0.5])
@pytest.mark.parametrize("size", [20, 10_000])
def test_of_a_single_document_the_end_is_for_validation(tmp_path: Path, size: int, share: float) -> None:
    """It counts once, where it ends, and no end of text is where it was divided."""
    path = tmp_path / "book.txt"
    path.write_bytes(random_words(size))
    pieces = pieces_of(text_files([path], share))
    train, validation = split_text(pieces, "train"), split_text(pieces, "val")
    assert train + validation == random_words(size) + b"|"
    assert train
    assert abs(len(validation) - 1 - share * size * 33) <= 34
    assert_resumes_anywhere(lambda: text_files([path], share))


def test_equal_documents_are_on_the_same_side_in_any_order(files: list[Path], tmp_path: Path) -> None:
    texts = [random_words(20, number % 50) for number in range(100)]
    sides = []
    for name, ordered in (("one", texts), ("two", texts[::-1])):
        path = write_lines(tmp_path / f"{name}.jsonl", ordered)
        pieces = pieces_of(text_files([path], 0.1))
        sides.append({split: set(split_text(pieces, split).split(b"|")[:-1]) for split in ("train", "val")})
        assert not sides[-1]["train"] & sides[-1]["val"]
    assert sides[0] == sides[1]
    assert_resumes_anywhere(lambda: text_files(files, 0.1))


def test_the_recipe_depends_only_on_the_content(files: list[Path], tmp_path: Path) -> None:
    recipe = text_files(files, 0.01).recipe
    moved = [path.rename(tmp_path / f"moved-{path.name}") for path in files]
    assert text_files(moved, 0.01).recipe == recipe
    assert text_files(moved[::-1], 0.01).recipe != recipe
    assert text_files(moved, 0.02).recipe != recipe
    # The same bytes with a document's end elsewhere.
    joined = moved[0].read_bytes() + moved[1].read_bytes()
    moved[0].write_bytes(joined[:10_000])
    moved[1].write_bytes(joined[10_000:])
    assert text_files(moved, 0.01).recipe != recipe


def test_text_that_cannot_be_split_is_refused(tmp_path: Path, files: list[Path]) -> None:
    (tmp_path / "solid.txt").write_text("x" * 100_000)
    (tmp_path / "empty.txt").write_text("")
    for name in "ab":
        (tmp_path / f"{name}.same").write_text("the same\n" * 100)
    same = [tmp_path / "a.same", tmp_path / "b.same"]
    for message, paths, share in (
        ("one document of 100000 bytes without a place to cut", [tmp_path / "solid.txt"], 0.01),
        ("the files have no text", [tmp_path / "empty.txt"], 0.01),
        ("all 2 documents are identical", same, 0.5),
        ("share for validation is 0.0; it must be between 0 and 1", files, 0.0),
        ("share for validation is 1.0", files, 1.0),
        ("share for validation is nan", files, float("nan")),
        ("leaves nothing to train on", files, 0.9999999),
        ("no files are given", [], 0.01),
        ("there is no file .*nowhere", [tmp_path / "nowhere"], 0.01),
    ):
        with pytest.raises(ValueError, match=message):
            pieces_of(text_files(paths, share))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "change", [lambda content: content + b"more ", lambda content: b"x" + content[1:], lambda _: b""]
)
def test_a_file_that_changes_meanwhile_is_detected(
    files: list[Path], change: Callable[[bytes], bytes], alone: bool
) -> None:
    corpus = text_files(files[-1:] if alone else files, 0.01)
    files[-1].write_bytes(change(files[-1].read_bytes()))
    with pytest.raises(ValueError, match=rf"{files[-1].name} changed while it was being read"):
        pieces_of(corpus)


def test_the_demos_text_is_the_same_everywhere() -> None:
    """If it changes, the numbers in the README have to be measured again."""
    corpus = demo(0.05)
    digest = hashlib.sha256(b"".join(piece.text for piece in pieces_of(corpus))).hexdigest()
    assert (digest[:16], corpus.total) == ("4e84cdfb3598dbff", 1_924_799)


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with a small library and a few packages."""
    library = tmp_path / "lib"
    packages = library / "site-packages"
    for name, content in {
        "b.py": random_words(200, 1),
        "a.py": random_words(200, 2),
        "notes.txt": b"no source",
        "empty.py": b"",
        "latin.py": b"# -*- coding: latin-1 -*-\n# \xe9\n",
        "test/test_a.py": b"left out",
        "json/tests/test_b.py": b"left out",
        "__pycache__/c.py": b"left out",
        "site-packages/p/one.py": random_words(150, 3),
        "site-packages/q/two.py": random_words(150, 4),
    }.items():
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (library / ".#a.py").symlink_to("someone@somewhere.1234")  # an editor's mark on an open file
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library), "purelib": str(packages)})
    return library


@pytest.mark.usefixtures("interpreter")
def test_embedded_takes_the_library_and_then_packages() -> None:
    origins = list(dict.fromkeys(Path(piece.origin).name for piece in pieces_of(embedded(10**6, 0.1))))
    assert origins[:2] == ["a.py", "b.py"]
    assert sorted(origins[2:]) == ["one.py", "two.py"]
    origins = [Path(piece.origin).name for piece in pieces_of(embedded(20_000, 0.1))]
    assert len(set(origins)) == 3


def test_enwik8_is_cut_at_the_usual_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "PIECE_BYTES", 100)
    path = tmp_path / "enwik8"
    content = random_words(100)[:3000]
    path.write_bytes(content)
    corpus = Enwik8(path, (2500, 200, 300))
    pieces = pieces_of(corpus)
    assert split_text(pieces, "train") == content[:2500] + b"|"
    assert split_text(pieces, "val") == content[2500:2700] + b"|"
    assert split_text(pieces, "test") == content[2700:] + b"|"
    assert_resumes_anywhere(lambda: Enwik8(path, (2500, 200, 300)))
    with pytest.raises(ValueError, match=r"is not a file of 100000000 bytes"):
        Enwik8(path)


class FakeStream:
    """A fake streamed dataset of numbered documents, with a position to resume from."""

    def __init__(self, split: str, num_documents: int) -> None:
        self.split, self.num_documents, self.position = split, num_documents, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self.position < self.num_documents:
            self.position += 1
            yield {"text": f"{self.split} {self.position - 1}"}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Replaces the library: every split has as many documents as told."""

    def replaced(num_documents: int) -> None:
        def load_dataset(path: str, *, split: str, streaming: bool, name: str | None = None) -> FakeStream:
            assert streaming
            assert (path, name) in {("Skylion007/openwebtext", None), ("allenai/c4", "en")}
            return FakeStream(split, num_documents)

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))

    return replaced


def test_openwebtext_is_split_as_nanogpt_does(
    hub: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8,013,769 documents the library selects 4007; these are the first of them in the dataset's order."""
    validation = nanogpt_validation(corpora.OPENWEBTEXT_DOCUMENTS)
    assert len(validation) == 4007
    assert sorted(validation)[:3] == [1997, 3930, 5738]
    monkeypatch.setattr(corpora, "OPENWEBTEXT_DOCUMENTS", 3_000)
    hub(3_000)
    pieces = pieces_of(openwebtext(None))
    of_validation = {int(piece.text.split()[1]) for piece in pieces if piece.split == "val"}
    assert of_validation == nanogpt_validation(3_000)
    assert [piece.text for piece in pieces] == [b"train %d" % number for number in range(3_000)]
    assert all(piece.ends for piece in pieces)


def test_the_split_against_the_library() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    documents = datasets.Dataset.from_dict({"number": list(range(10_000))})
    split = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert set(split["test"]["number"]) == nanogpt_validation(10_000)


def test_c4_uses_its_validation_set(hub: Callable[[int], None]) -> None:
    hub(100)
    pieces = pieces_of(c4(30, 4))
    for split, name, num in (("val", b"validation", 4), ("train", b"train", 30)):
        assert [piece.text for piece in pieces if piece.split == split] == [
            b"%s %d" % (name, number) for number in range(num)
        ]
    assert c4(30, 4).total == 34
    assert_resumes_anywhere(lambda: c4(20, 4))


def test_a_stream_that_ends_early_is_an_error(hub: Callable[[int], None]) -> None:
    hub(10)
    with pytest.raises(ValueError, match="c4: train ended after 10 documents; 20 were expected"):
        pieces_of(c4(20, 4))
    with pytest.raises(ValueError, match="the number of validation documents is 0"):
        c4(20, 0)


def test_with_the_library_on_local_files(tmp_path: Path) -> None:
    """Several files streamed by the library itself, resumed at every document."""
    pytest.importorskip("datasets", reason="needs the package datasets")
    for number in range(3):
        lines = [json.dumps({"text": f"file {number} line {line}"}) for line in range(7)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")

    def make() -> Hub:
        dataset = {"path": "json", "data_files": str(tmp_path / "*.jsonl")}
        return Hub("local", dataset, {"train": 20}, lambda *_: False)

    texts = [piece.text.decode() for piece in pieces_of(make())]
    assert texts == [f"file {number} line {line}" for number in range(3) for line in range(7)][:20]
    assert_resumes_anywhere(make)
