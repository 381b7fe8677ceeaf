"""Cutting text: nothing is lost, pieces are bounded, and tokens do not change."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.data.pieces import cut


@given(st.binary(max_size=3000), st.integers(1, 400))
def test_pieces_join_to_the_whole(content: bytes, size: int) -> None:
    pieces = list(cut(io.BytesIO(content), size))
    assert b"".join(pieces) == content
    assert all(len(piece) > size for piece in pieces[:-1])
    assert all(pieces)


@given(st.text(max_size=2000), st.integers(1, 400))
def test_no_character_is_cut(text: str, size: int) -> None:
    assert "".join(piece.decode() for piece in cut(io.BytesIO(text.encode()), size)) == text


def test_cuts_come_soon_after_the_size_in_real_text() -> None:
    text = b"one two three, four\nfive " * 1000
    assert max(map(len, cut(io.BytesIO(text), 100))) < 110


class CountingReader(io.BytesIO):
    num_reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_reads += 1
        return super().read(size)


def test_text_without_a_place_to_cut_is_one_piece_and_linear() -> None:
    file = CountingReader(b"x" * 10**6)
    assert [len(piece) for piece in cut(file, 10)] == [10**6]
    assert file.num_reads < 30


@pytest.mark.parametrize(
    "text",
    [
        b"x" * (1 << 24),  # nowhere a blank
        "\u4eca\u5929\u5929\u6c14\u5f88\u597d".encode() * (1 << 20),  # nor here, and no ASCII
        b"x" * (1 << 23) + b"some word " * (1 << 20),  # many pieces after a very long one
    ],
    ids=["ascii", "chinese", "words later"],
)
def test_text_without_spaces_is_cut_in_linear_time(text: bytes) -> None:
    """About 0.1 seconds; it was 2 to 5 when the same text was searched or copied repeatedly."""
    started = time.process_time()
    num_pieces = sum(1 for _ in cut(io.BytesIO(text), 1 << 16))
    assert time.process_time() - started < 1
    assert num_pieces < 200


@pytest.mark.parametrize("ending", ["\n", " ", "\u3000\u3002\n"])
def test_text_without_ascii_is_cut_too(ending: str) -> None:
    text = ("\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002" + ending) * 500
    pieces = list(cut(io.BytesIO(text.encode()), 100))
    assert b"".join(pieces) == text.encode()
    assert all(len(piece) < 130 for piece in pieces[:-1])
    assert len(pieces[-1]) < 400


def test_text_with_ascii_is_cut_only_after_ascii() -> None:
    """The cuts decide what is for validation: corpora of Latin text must not change."""
    text = ("caf\u00e9 caf\u00e9 \u2013 " * 5 + "tea ") * 50
    pieces = list(cut(io.BytesIO(text.encode()), 100))
    assert {piece[-3:] for piece in pieces[:-1]} == {b"tea"}


@pytest.mark.parametrize("size", [1, 2, 5, 17])
@given(text=st.text(st.sampled_from("ab1, .'s\n\t\r\u00a0\u3000\u2009\u00e9\u0301<|>"), max_size=300))
def test_cuts_do_not_change_gpt2_splits(size: int, text: str) -> None:
    """Splitting the pieces gives what splitting the whole gives."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    pieces = [piece.decode() for piece in cut(io.BytesIO(text.encode()), size)]
    assert [word for piece in pieces for word, _ in split(piece)] == [word for word, _ in split(text)]
