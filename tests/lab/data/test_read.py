"""The same documents in every format and compression, cut where no token changes; clear errors otherwise."""

import bz2
import gzip
import io
import json
import lzma
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.data import read
from merit_lab.data.command import main
from merit_lab.data.corpora import text_files
from merit_lab.data.read import cut, texts

DOCUMENTS = [f'document {number} says "Größe" {{}}\n' + f"word {number} " * 300 for number in range(40)]
TEXT = "Some text. " * 2000

COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: zstd.compress(content[:999]) + zstd.compress(content[999:]),  # of two frames
}


def json_lines(field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in DOCUMENTS)


def parquet(field: str = "text") -> bytes:
    buffer = io.BytesIO()
    frame = pl.DataFrame({"id": range(len(DOCUMENTS)), field: DOCUMENTS})
    frame.write_parquet(buffer, row_group_size=7)
    return buffer.getvalue()


def documents(path: Path, **layout: str) -> list[str]:
    """The documents of a file."""
    found: list[str] = [""]
    for _, text, ends in texts(path, **layout):
        found[-1] += text.decode()
        if ends:
            found.append("")
    assert found.pop() == ""
    return found


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("size", [100, 1 << 16])
@pytest.mark.parametrize("name", ["docs.jsonl", "docs.parquet", "docs.NDJSON", "docs.txt"])
def test_every_format_in_every_compression(
    tmp_path: Path, name: str, compression: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "PIECE_BYTES", size)
    content = {
        "docs.jsonl": b"\xef\xbb\xbf" + json_lines() + b"\n\n",  # with a mark, and blank lines at the end
        "docs.NDJSON": json_lines()[:-1],
        "docs.parquet": parquet(),
        "docs.txt": "\n<|endoftext|>\r\n".join(DOCUMENTS).encode(),
    }[name]
    if name.endswith(".parquet") and compression:
        return  # it is packed inside
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESSED[compression](content))
    found = documents(path, separator="<|endoftext|>")
    assert [text.rstrip("\n") for text in found] == DOCUMENTS


def test_a_separator_is_a_whole_line(tmp_path: Path) -> None:
    """At the end of a file it divides nothing."""
    path = tmp_path / "docs.txt"
    path.write_text("x" * (1 << 16) + "--\none -- two\n--\n\n  -- \nthree\n--\n")
    found = documents(path, separator="--")
    assert found == ["x" * (1 << 16) + "--\none -- two\n", "\n", "three\n"]
    assert text_files([path], 0.1, separator=" -- ").total == sum(map(len, found))
    with pytest.raises(ValueError, match="separator is '---', but no text file has such a line"):
        text_files([path], 0.1, separator="---")


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_bytes(json_lines("body"))
    (tmp_path / "docs.parquet").write_bytes(parquet("body"))
    for name, place in (("docs.jsonl", "line 1,"), ("docs.parquet", "")):
        assert documents(tmp_path / name, field="body") == DOCUMENTS
        wanted = rf"{name},? ?{place} has no \w+ 'text', but 'id', 'body': .*--field"
        with pytest.raises(ValueError, match=wanted):
            documents(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"cannot be read as JSON \(.*\): the file must have one JSON object on each line"),
        ("[1]", "is a value of type list: the file must have one JSON object on each line"),
        ('{"content": "x"}', "has no field 'text', but 'content': .*--field"),
        ('{"text": null}', "has nothing in 'text', which must be text"),
        ('{"text": 3}', "has a value of type int in 'text', which must be text"),
        ('{"text": "a\\ud800b"}', "has half a character in 'text', at 1"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read as JSON"),
        ('{"id": ' + "9" * 5000 + ', "text": "x"}', "cannot be read as JSON"),
        ('{"text": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_an_invalid_line_is_named(
    tmp_path: Path, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(json_lines() + line.encode("latin-1") + b"\n")
    assert main(["text", str(path), "--out", str(tmp_path / "data")]) == 1
    with pytest.raises(ValueError, match=rf"docs\.jsonl, line 41, {message}"):
        raise ValueError(capsys.readouterr().err)


def test_an_invalid_row_is_named(tmp_path: Path) -> None:
    for name, values in (("null", ["a", None]), ("number", [1, 2])):
        pl.DataFrame({"text": values}).write_parquet(tmp_path / f"{name}.parquet")
        with pytest.raises(ValueError, match=r"parquet, row \d, has .* in 'text', which must be text"):
            documents(tmp_path / f"{name}.parquet")


def test_a_folder_is_its_files_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "corpus"
    for name in ("b/2.md", "b/1.txt", "a.txt", ".hidden.txt", ".git/x.txt", "config.json", "notes.pdf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} " * 2000)
    (folder / "c.jsonl").write_bytes(json_lines())
    origins = dict.fromkeys(piece.origin.split(",")[0] for piece in text_files([folder], 0.1).pieces(0))
    found = [Path(origin).relative_to(folder).as_posix() for origin in origins]
    assert found == ["a.txt", "b/1.txt", "b/2.md", "c.jsonl"]
    assert main(["text", str(folder), "--tokenizer", "bytes", "--out", str(tmp_path / "data")]) == 0
    assert "skipping 2 files, such as " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no file whose name ends with one of \.txt, .*\.gz"):
        text_files([tmp_path / "empty"], 0.1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("book.txt", b"%PDF-1.7 ...", "is not text: .*iconv"),
        ("book.txt", b"Obj\x01", "is not text"),
        ("book.txt", parquet(), r"is not text: .* must be named so: .*\.parquet"),
        ("book.parquet", TEXT.encode(), "could not be read .* not what its name says"),
        ("book.parquet", b"PAR1" + TEXT.encode(), "could not be read .* damaged or truncated"),
        ("book.parquet", parquet()[:-9], "could not be read .* damaged or truncated"),
        *(
            (f"book{suffix}.txt", pack(TEXT.encode()), "not text")
            for suffix, pack in COMPRESSED.items()
            if suffix
        ),
        *((f"book.txt{suffix}", TEXT.encode(), "could not be read") for suffix in COMPRESSED if suffix),
        *(
            (f"book.txt{suffix}", compress(TEXT.encode())[:-9], "could not be read .*truncated")
            for suffix, compress in COMPRESSED.items()
            if suffix
        ),
        ("book.gz", gzip.compress(json_lines()), r"looks like JSON: name it \.jsonl"),
        *((f"{e}.txt", TEXT.encode(e), "UTF-16") for e in ("utf-16", "utf-16-le", "utf-16-be", "utf-32")),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # compressed bytes contain the time
)
def test_files_that_are_not_text_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = ["text", str(tmp_path / name), "--out", str(tmp_path / "data"), "--tokenizer", "bytes"]
    assert main(arguments) == 1
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        raise ValueError(capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_reading_needs_memory_for_a_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    line = json.dumps({"text": "some words of a text " * 500}).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(3000):  # 30 MB
            file.write(line[:-2] + b'%d"}\n' % number)
    tracemalloc.start()
    try:
        assert sum(len(piece.text) for piece in text_files([path], 0.1).pieces(0)) > 30e6
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=500), max_size=20), st.integers(1, 400))
def test_pieces_join_to_the_whole(blocks: list[bytes], size: int) -> None:
    pieces = list(cut(blocks, size))
    assert b"".join(text for text, _ in pieces) == b"".join(blocks)
    assert all(len(text) > size for text, _ in pieces[:-1])
    assert all(text for text, _ in pieces)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@pytest.mark.parametrize("size", [1, 2, 5, 17])
@given(text=st.text(st.sampled_from("ab1, .'s\n\t\r\u00a0\u3000\u2009\u00e9\u0301<|>"), max_size=300))
def test_cuts_do_not_change_gpt2_splits(size: int, text: str) -> None:
    """Splitting the pieces gives what splitting the whole gives."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False).pre_tokenize_str
    pieces = [piece.decode() for piece, _ in cut([text.encode()], size)]
    assert [word for piece in pieces for word, _ in split(piece)] == [word for word, _ in split(text)]


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
    blocks = (text[begin : begin + (1 << 16)] for begin in range(0, len(text), 1 << 16))
    num_pieces = sum(1 for _ in cut(blocks, 1 << 16))
    assert time.process_time() - started < 1
    assert num_pieces < 200
