"""The same documents in every format and compression, and clear errors for other files."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merit_lab.data import Dataset
from merit_lab.data.command import main
from merit_lab.data.corpora import text_files
from merit_lab.data.documents import DEFAULT_LAYOUT, Layout, texts
from merit_lab.data.hashes import Hashes
from merit_lab.data.prepare import prepare

DOCUMENTS = [f'document {number} says "Größe" {{}}\n' + f"word {number} " * 300 for number in range(40)]

COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}


def json_lines(field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in DOCUMENTS)


def parquet(field: str = "text") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(DOCUMENTS)), field: DOCUMENTS}), buffer, row_group_size=7)
    return buffer.getvalue()


def read(path: Path, layout: Layout = DEFAULT_LAYOUT, size: int = 1 << 16) -> list[str]:
    """The documents of a file."""
    read: list[str] = [""]
    for _, text, ends in texts(path, layout, size):
        read[-1] += text.decode()
        if ends:
            read.append("")
    assert read.pop() == ""
    return read


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("size", [100, 1 << 16])
@pytest.mark.parametrize("name", ["docs.jsonl", "docs.parquet", "docs.NDJSON", "docs.txt"])
def test_every_format_in_every_compression(tmp_path: Path, name: str, compression: str, size: int) -> None:
    content = {
        "docs.jsonl": b"\xef\xbb\xbf" + json_lines() + b"\n\n",  # with a mark, and blank lines at the end
        "docs.NDJSON": json_lines()[:-1],
        "docs.parquet": parquet(),
        "docs.txt": "\n<|endoftext|>\r\n".join(DOCUMENTS).encode(),
    }[name]
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESSED[compression](content))
    found = read(path, Layout(separator="<|endoftext|>"), size)
    assert [text.rstrip("\n") for text in found] == DOCUMENTS


def test_all_formats_give_the_same_data(tmp_path: Path) -> None:
    """40 documents are 40 documents, each followed by the end-of-text token."""
    fingerprints = set()
    (tmp_path / "many").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / "many" / f"{number:02}.txt").write_text(text)
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(json_lines()))
    (tmp_path / "docs.parquet.zst").write_bytes(COMPRESSED[".zst"](parquet()))
    for name in ("many", "docs.jsonl.gz", "docs.parquet.zst"):
        index = prepare(text_files([tmp_path / name], 0.1), tmp_path / f"data-{name}", tokenizer="bpe-300")
        assert sum(entry.num_documents for entry in index.files.values()) == 40
        assert sum(entry.num_text_bytes for entry in index.files.values()) == len("".join(DOCUMENTS).encode())
        tokens = Dataset.open(tmp_path / f"data-{name}").train.tokens
        assert (tokens == index.end_of_text).sum() == index.files["train.bin"].num_documents
        fingerprints.add(index.fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst", ".bz2"])
def test_compressed_text_is_cut_like_plain_text(tmp_path: Path, compression: str) -> None:
    content = "\n".join(DOCUMENTS).encode()
    for name, written in (
        ("plain.txt", content),
        (f"compressed.txt{compression}", COMPRESSED[compression](content)),
    ):
        (tmp_path / name).write_bytes(written)
    plain, compressed = (
        text_files([tmp_path / name], 0.1) for name in ("plain.txt", f"compressed.txt{compression}")
    )
    assert compressed.recipe == plain.recipe
    assert compressed.total == plain.total == len(content)


def test_a_separator_is_a_whole_line(tmp_path: Path) -> None:
    """Also if lines are so long that they are read in parts."""
    path = tmp_path / "docs.txt"
    path.write_text("x" * (1 << 16) + "--\none -- two\n--\n\n  -- \nthree")
    found = read(path, Layout(separator="--"))
    assert found == ["x" * (1 << 16) + "--\none -- two\n", "\n", "three"]
    assert read(path, Layout(separator=" -- ")) == found


def test_another_field(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_bytes(json_lines("body"))
    (tmp_path / "docs.parquet").write_bytes(parquet("body"))
    for name, place in (("docs.jsonl", "line 1,"), ("docs.parquet", "")):
        assert read(tmp_path / name, Layout(field="body")) == DOCUMENTS
        with pytest.raises(
            ValueError, match=rf"{name},? ?{place} has no \w+ 'text', but 'id', 'body': .*--field"
        ):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"is not JSON \(.*\): the file must have one JSON object on each line"),
        ("[1]", "is a value of type list: the file must have one JSON object on each line"),
        ('{"content": "x"}', "has no field 'text', but 'content': .*--field"),
        ('{"text": null}', "has nothing in 'text', which must be text"),
        ('{"text": 3}', "has a value of type int in 'text', which must be text"),
        ('{"text": "a\\ud800b"}', "has half a character in 'text', at 1"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "docs.jsonl"
    path.write_bytes(json_lines() + line.encode() + b"\n")
    with pytest.raises(ValueError, match=rf"docs\.jsonl, line 41, {message}"):
        text_files([path], 0.1)


def test_an_invalid_row_is_named(tmp_path: Path) -> None:
    for name, values in (("null", ["a", None]), ("number", [1, 2])):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": values}), path)
        with pytest.raises(ValueError, match=r"parquet, row \d, has .* in 'text', which must be text"):
            read(path)


def test_a_folder_is_its_files_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "corpus"
    for name in ("b/2.md", "b/1.txt", "a.txt", ".hidden.txt", ".git/x.txt", "config.json", "notes.pdf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} " * 2000)
    (folder / "c.jsonl").write_bytes(json_lines())
    origins = dict.fromkeys(piece.origin.split(",")[0] for piece in text_files([folder], 0.1).pieces())
    assert [Path(origin).relative_to(folder).as_posix() for origin in origins] == [
        "a.txt",
        "b/1.txt",
        "b/2.md",
        "c.jsonl",
    ]
    output = ["--out", str(tmp_path / "data")]
    assert main(["text", str(folder), "--tokenizer", "bytes", *output]) == 0
    assert "skipping 2 files, such as " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no file whose name ends with one of \.txt, .*\.gz"):
        text_files([tmp_path / "empty"], 0.1)


def archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        file.addfile(tarfile.TarInfo("x"), io.BytesIO())
    return buffer.getvalue()


def office() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    return buffer.getvalue()


TEXT = "Some text. " * 2000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("book.txt", b"%PDF-1.7 ...", "book.txt is a PDF file: extract its text. Supported are UTF-8"),
        ("book.docx", office(), "book.docx is a ZIP archive, possibly an office document"),
        ("book.tar.gz", gzip.compress(archive()), "book.tar.gz is a tar archive: unpack it"),
        ("book.txt", gzip.compress(TEXT.encode()), "is compressed with gzip: rename it to book.txt.gz"),
        ("book.txt.gz", TEXT.encode(), "is named .gz but is not compressed with gzip"),
        ("book.txt.zst", gzip.compress(TEXT.encode()), "is compressed with gzip|is named .zst but is not"),
        ("book.txt", parquet(), "is a Parquet file: rename it to book.parquet"),
        ("book.parquet", TEXT.encode(), "is named as Parquet, but begins with b'Some'"),
        (
            "book.parquet",
            b"PAR1" + TEXT.encode(),
            "book.parquet could not be read .* damaged or truncated",
        ),
        ("book.txt.gz", gzip.compress(TEXT.encode())[:-9], "book.txt.gz could not be read .*truncated"),
        ("book.txt.xz", lzma.compress(TEXT.encode())[:-9], "book.txt.xz could not be read .*truncated"),
        (
            "book.txt.zst",
            COMPRESSED[".zst"](TEXT.encode())[:-3],
            "book.txt.zst could not be read .*truncated",
        ),
        ("book.gz", gzip.compress(json_lines()), r"book.gz looks like JSON: name it \.jsonl"),
        (
            "book.txt",
            TEXT.encode("utf-16"),
            "book.txt is UTF-16 text; only UTF-8 is supported: .*iconv -f UTF-16 ",
        ),
        ("book.txt", TEXT.encode("utf-16-le"), "book.txt is UTF-16LE text; .*iconv -f UTF-16LE"),
        ("book.txt", TEXT.encode("utf-16-be"), "book.txt is UTF-16BE text"),
        ("book.txt.gz", gzip.compress(TEXT.encode("utf-32")), "book.txt.gz is UTF-32 text"),
        ("book.jsonl", json_lines().decode().encode("utf-16"), "book.jsonl is UTF-16 text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",  # compressed bytes contain the time
)
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_files_that_are_not_text_are_refused(
    tmp_path: Path,
    name: str,
    content: bytes,
    message: str,
    tokenizer: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = ["text", str(tmp_path / name), "--out", str(tmp_path / "data"), "--tokenizer", tokenizer]
    assert main(arguments) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        ("cp1252", "Der Müller möchte größere Brötchen, sagte er: „schön“. "),
        ("shift_jis", "今日は天気がとても良いので、公園へ散歩に行きました。 "),
    ],
)
def test_the_encoding_of_other_text_is_guessed(
    tmp_path: Path, encoding: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says that it is a guess; with the tokenizer bytes the text can be used unchanged."""
    (tmp_path / "book.txt").write_bytes((sentence * 400).encode(encoding))
    arguments = ["text", str(tmp_path / "book.txt"), "--out", str(tmp_path / "data"), "--tokenizer"]
    assert main([*arguments, "bpe-300"]) == 1
    refused = capsys.readouterr().err
    assert "book.txt is not UTF-8 text" in refused
    assert "it may be cp" in refused  # cp1252 and its neighbours; shift_jis is cp932
    assert main([*arguments, "bytes"]) == 0


def test_reading_needs_memory_for_a_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "docs.jsonl.gz"
    line = json.dumps({"text": "some words of a text " * 500}).encode()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(3000):  # 30 MB
            file.write(line[:-2] + b'%d"}\n' % number)
    tracemalloc.start()
    try:
        assert sum(len(piece.text) for piece in text_files([path], 0.1).pieces()) > 30e6
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_hashes_are_kept_in_order() -> None:
    hashes = Hashes()
    values = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(20_000)]
    for value in values:
        hashes.append(value)
    first, second = iter(hashes), iter(hashes)
    assert [next(first) for _ in range(9000)] == values[:9000]
    assert list(second) == values
    assert list(first) == values[9000:]
    assert (len(hashes), hashes.smallest, hashes.largest) == (20_000, min(values), max(values))


def test_a_separator_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    """Two files are two documents, also without it."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a line of text\n" * 500 + "---- \n" + "more of it\n" * 500)
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(ValueError, match="separator is '---', but no text file has such a line"):
        text_files(texts, 0.1, Layout(separator="---"))
    assert text_files(texts, 0.1, Layout(separator="----")).total == 2 * 500 * (15 + 11)


def test_a_separator_at_the_end_of_every_file_is_left_out(tmp_path: Path) -> None:
    """A document for each file: there it divides nothing, and is no text."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("a line of text\n" * 500 + "<|endoftext|>\n")
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert text_files(texts, 0.1, Layout(separator="<|endoftext|>")).total == 2 * 500 * 15
