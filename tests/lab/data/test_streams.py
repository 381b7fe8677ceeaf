"""Corpora of the hub: nanoGPT's split, resuming at any document, and clear errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from merit_lab.data import streams
from merit_lab.data.streams import Section, Stream, c4, nanogpt_validation, openwebtext


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


def fake_load(num_documents: int) -> Any:
    def load(path: str, *, split: str, streaming: bool, name: str | None = None) -> FakeStream:
        assert streaming
        assert (path, name) in {("Skylion007/openwebtext", None), ("allenai/c4", "en")}
        return FakeStream(split, num_documents)

    return load


def assert_resumes_anywhere(make: Any) -> None:
    corpus = make()
    everything, states = [], []
    for piece in corpus.pieces():
        everything.append(piece)
        states.append(json.loads(json.dumps(corpus.state())))
    for position, state in enumerate(states):
        assert list(make().pieces(state)) == everything[position + 1 :]


def test_the_split_matches_nanogpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8,013,769 documents the library selects 4007; these are the first of them in the dataset's order."""
    validation = nanogpt_validation(streams.OPENWEBTEXT_DOCUMENTS)
    assert len(validation) == 4007
    assert sorted(validation)[:3] == [1997, 3930, 5738]
    monkeypatch.setattr(streams, "OPENWEBTEXT_DOCUMENTS", 10_000)
    validation = nanogpt_validation(10_000)
    assert len(validation) == 5
    pieces = list(openwebtext(None, fake_load(10_000)).pieces())
    assert {int(piece.text.split()[1]) for piece in pieces if piece.split == "val"} == validation
    assert [piece.text for piece in pieces] == [b"train %d" % number for number in range(10_000)]
    assert all(piece.ends for piece in pieces)


def test_the_split_against_the_library() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    documents = datasets.Dataset.from_dict({"number": list(range(10_000))})
    split = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert set(split["test"]["number"]) == nanogpt_validation(10_000)


def test_part_of_openwebtext() -> None:
    first = min(nanogpt_validation(streams.OPENWEBTEXT_DOCUMENTS))
    pieces = list(openwebtext(first + 1, fake_load(10**6)).pieces())
    assert [piece.split for piece in pieces] == ["train"] * first + ["val"]
    with pytest.raises(ValueError, match=f"request more than {first}"):
        openwebtext(first, fake_load(10**6))


def test_c4_uses_its_validation_set() -> None:
    pieces = list(c4(30, 4, fake_load(100)).pieces())
    assert [piece.text for piece in pieces if piece.split == "val"] == [
        b"validation %d" % n for n in range(4)
    ]
    assert [piece.text for piece in pieces if piece.split == "train"] == [b"train %d" % n for n in range(30)]
    assert c4(30, 4, fake_load(100)).total == 34


def test_resumes_at_any_document(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_resumes_anywhere(lambda: c4(20, 4, fake_load(100)))
    monkeypatch.setattr(streams, "OPENWEBTEXT_DOCUMENTS", 300)
    assert_resumes_anywhere(lambda: openwebtext(None, fake_load(300)))


def test_a_stream_that_ends_early_is_an_error() -> None:
    with pytest.raises(ValueError, match="c4: train ended after 10 documents; 20 were expected"):
        list(c4(20, 4, fake_load(10)).pieces())
    with pytest.raises(ValueError, match="the number of validation documents is 0"):
        c4(20, 0, fake_load(10))


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"c4 needs the package datasets, .* 'merit-optim\[eval\]'"):
        c4(20, 4)


def test_with_the_library_on_local_files(tmp_path: Path) -> None:
    """Several files streamed by the library itself, resumed at every document."""
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    for number in range(3):
        lines = [json.dumps({"text": f"file {number} line {line}"}) for line in range(7)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")

    def make() -> Stream:
        section = Section(hub_split="train", num_documents=20, destination=lambda _: "train")
        dataset = {"path": "json", "data_files": str(tmp_path / "*.jsonl")}
        return Stream({"name": "local"}, dataset, [section], datasets.load_dataset)

    texts = [piece.text.decode() for piece in make().pieces()]
    assert texts == [f"file {number} line {line}" for number in range(3) for line in range(7)][:20]
    assert_resumes_anywhere(make)
