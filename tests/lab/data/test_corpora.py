"""Corpora on disk: a fixed order, a stated split that is never empty, and changed files are detected."""

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merit_lab.data import corpora
from merit_lab.data.corpora import Enwik8, demo, embedded, text_files
from merit_lab.data.pieces import TextCorpus, TextPiece


def random_words(count: int, seed: int = 0) -> bytes:
    """Text without repetitions."""
    return b"".join(
        hashlib.md5(b"%d %d" % (seed, number)).hexdigest().encode() + b" " for number in range(count)
    )


def split_text(pieces: Iterable[TextPiece], split: str) -> bytes:
    """A split's text, with a mark where text ends."""
    return b"".join(piece.text + b"|" * piece.ends for piece in pieces if piece.split == split)


def assert_resumes_anywhere(corpus: TextCorpus, again: TextCorpus) -> None:
    everything = list(corpus.pieces())
    states = []
    for _ in corpus.pieces():
        states.append(corpus.state())  # noqa: PERF401  (the state belongs to the moment)
    for position, state in enumerate(states):
        assert list(again.pieces(state)) == everything[position + 1 :]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = []
    for number, size in enumerate((3000, 1, 8000)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(random_words(size, number))
    return paths


def test_every_byte_is_in_one_split_in_order(files: list[Path]) -> None:
    corpus = text_files(files, 0.1)
    pieces = list(corpus.pieces())
    assert b"".join(piece.text for piece in pieces) == b"".join(path.read_bytes() for path in files)
    assert corpus.total == sum(path.stat().st_size for path in files)
    share = len(split_text(pieces, "val")) / corpus.total
    assert 0.02 < share < 0.3
    assert_resumes_anywhere(text_files(files, 0.1), text_files(files, 0.1))


def test_the_text_ends_if_the_next_piece_is_in_another_split(files: list[Path]) -> None:
    pieces = list(text_files(files, 0.3).pieces())
    assert {piece.split for piece in pieces} == {"train", "val"}
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        continues = following is not None and (piece.split, piece.origin) == (
            following.split,
            following.origin,
        )
        assert piece.ends != continues


def test_the_hash_of_the_text_decides(files: list[Path], tmp_path: Path) -> None:
    """A larger share keeps the validation text, and a copy of a file is split the same way."""
    small, large = (
        {piece.text for piece in text_files(files, share).pieces() if piece.split == "val"}
        for share in (0.05, 0.3)
    )
    assert small < large
    copy = tmp_path / "copy.txt"
    copy.write_bytes(files[0].read_bytes())
    pieces = list(text_files([*files, copy], 0.3).pieces())
    sides = {piece.text: piece.split for piece in pieces if piece.origin == str(files[0])}
    assert {piece.text: piece.split for piece in pieces if piece.origin == str(copy)} == sides


@given(share=st.floats(1e-12, 0.02), seed=st.integers(0, 100))
def test_validation_is_never_empty(tmp_path_factory: pytest.TempPathFactory, share: float, seed: int) -> None:
    path = tmp_path_factory.getbasetemp() / "small.txt"
    path.write_bytes(random_words(400, seed))  # 13 kB: four pieces
    pieces = list(text_files([path], share).pieces())
    assert {piece.split for piece in pieces} == {"train", "val"}


@pytest.mark.parametrize("size", [5_000, 10_000, 20_000, 40_000, 400_000])
def test_a_small_text_is_left_to_train_on(tmp_path: Path, size: int) -> None:
    """One piece is for validation, whichever it is."""
    path = tmp_path / "small.txt"
    path.write_bytes(random_words(size // 33))
    pieces = [len(piece.text) for piece in text_files([path], 1e-9).pieces()]
    assert max(pieces) < 0.15 * sum(pieces)
    assert max(pieces) >= min(4096, size // 9)


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
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(ValueError, match=r"the text has 11 bytes, too few .*: give more than 4096,"):
        text_files([short], 0.01)
    short.write_text("word " * 820 + "end")  # 4,103 bytes
    assert text_files([short], 0.01).total == 4103
    (tmp_path / "solid.txt").write_text("x" * 100_000)
    with pytest.raises(ValueError, match=r"the text has 100000 bytes, but no place to cut it: .* visible"):
        text_files([tmp_path / "solid.txt"], 0.01)
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"share for validation is .* between 0 and 1"):
            text_files(files, share)
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        text_files(files, 0.9999999)
    with pytest.raises(ValueError, match="no files are given"):
        text_files([], 0.01)
    with pytest.raises(ValueError, match=r"there is no file .*nowhere"):
        text_files([tmp_path / "nowhere"], 0.01)


def test_a_file_that_grows_beyond_its_last_piece_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "growing.txt"
    path.write_text("x" * 5000 + " " + "y" * 5000)
    corpus = text_files([path], 0.01)
    with path.open("a") as file:
        file.write(" and more")
    with pytest.raises(ValueError, match=r"growing\.txt changed while it was being read"):
        list(corpus.pieces())


@pytest.mark.parametrize("change", ["longer", "shorter", "shorter by a piece", "another beginning"])
def test_a_file_that_changes_meanwhile_is_detected(files: list[Path], change: str) -> None:
    corpus = text_files(files, 0.01)
    *_, last_piece = corpus.pieces()
    content = files[-1].read_bytes()
    changed = {
        "longer": content + b"more ",
        "shorter": content[:-10],
        "shorter by a piece": content[: -len(last_piece.text)],
        "another beginning": b"x" + content[1:],
    }
    files[-1].write_bytes(changed[change])
    with pytest.raises(ValueError, match=rf"{files[-1].name} changed while it was being read"):
        list(corpus.pieces())


def test_the_demos_text_is_the_same_everywhere() -> None:
    """If it changes, the numbers in the README have to be measured again."""
    corpus = demo(0.05)
    assert corpus.recipe["sha256"] == "1c79f72aaa542cf704b8626171a5578ec4e3d9a494964dd1bd9f9907d6d28c9a"
    assert corpus.total == 1_924_799
    b"".join(piece.text for piece in corpus.pieces()).decode()


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
    origins = list(dict.fromkeys(Path(piece.origin).name for piece in embedded(10**6, 0.1).pieces()))
    assert origins[:2] == ["a.py", "b.py"]
    assert sorted(origins[2:]) == ["one.py", "two.py"]
    origins = [Path(piece.origin).name for piece in embedded(20_000, 0.1).pieces()]
    assert len(set(origins)) == 3


def test_embedded_ends_before_the_first_source_that_exceeds_the_limit(interpreter: Path) -> None:
    (interpreter / "a_long.py").write_bytes(random_words(600))
    origins = {Path(piece.origin).name for piece in embedded(20_000, 0.1).pieces()}
    assert origins == {"a.py"}, "no later ones, which would fit"


def test_embedded_does_not_depend_on_where_it_is(interpreter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = embedded(10**6, 0.1).recipe
    moved = interpreter.rename(interpreter.with_name("elsewhere"))
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: {"stdlib": str(moved), "purelib": str(moved / "site-packages")}
    )
    assert embedded(10**6, 0.1).recipe == recipe


@pytest.mark.usefixtures("interpreter")
def test_embedded_without_sources_within_the_limit() -> None:
    with pytest.raises(ValueError, match=r"no Python sources of up to 10 bytes .* raise the limit"):
        embedded(10, 0.1)
    with pytest.raises(ValueError, match="limit is 0"):
        embedded(0, 0.1)


def test_embedded_here() -> None:
    """This interpreter has enough sources, all UTF-8, the same twice."""
    corpus = embedded(3_000_000, 0.02)
    assert 2_000_000 < corpus.total <= 3_000_000
    b"".join(piece.text for piece in corpus.pieces()).decode()
    assert embedded(3_000_000, 0.02).recipe == corpus.recipe


def test_enwik8_is_cut_at_the_usual_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "_LARGEST_PIECE", 100)
    path = tmp_path / "enwik8"
    content = random_words(100)[:3000]
    path.write_bytes(content)
    corpus = Enwik8(path, (2500, 200, 300))
    pieces = list(corpus.pieces())
    assert split_text(pieces, "train") == content[:2500] + b"|"
    assert split_text(pieces, "val") == content[2500:2700] + b"|"
    assert split_text(pieces, "test") == content[2700:] + b"|"
    assert_resumes_anywhere(corpus, Enwik8(path, (2500, 200, 300)))
    with pytest.raises(ValueError, match=r"has 3000 bytes; enwik8 has 100000000"):
        Enwik8(path)


def test_repeated_text_cannot_be_split(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.txt", "copy.txt")]
    for path in paths:
        path.write_text("the same\n" * 100)
    with pytest.raises(ValueError, match="all 2 pieces of the text are identical"):
        text_files(paths, 0.5)
