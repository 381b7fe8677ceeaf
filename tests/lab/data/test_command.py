"""`merit prepare`: from the command line to files."""

import subprocess
import sys
from pathlib import Path

import pytest

from merit_lab.data import Dataset, command, validation_sequences
from merit_lab.data.command import main
from merit_lab.data.tokens import INDEX_NAME


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of text in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"line %d of some text\n" % number for number in range(2000)))
    return "text"


def test_embedded_with_a_trained_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "here")
    assert main(["embedded", "--limit", "300000", "--tokenizer", "bpe-400", "--out", output]) == 0
    dataset = Dataset.open(output)
    assert dataset.vocab_size == 400
    assert dataset.bytes_per_token is not None
    assert 1.5 < dataset.bytes_per_token < 5
    assert "training a vocabulary of 400 entries" in capsys.readouterr().out


def test_check_reads_all_of_it(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(text).write_bytes(b"".join(b"line %d of a longer text\n" % number for number in range(40_000)))
    assert main(["text", text, "--tokenizer", "bytes"]) == 0
    assert main(["check", "data/text"]) == 0
    assert "all files are unchanged" in capsys.readouterr().out
    content = bytearray(Path("data/text/train.bin").read_bytes())
    content[5000] ^= 1  # between the first blocks that a sample reads
    Path("data/text/train.bin").write_bytes(content)
    Dataset.open("data/text")
    assert main(["check", "data/text"]) == 1
    assert "train.bin has the sha256" in capsys.readouterr().err
    Path("data/text/dataset.json").unlink()
    assert main(["check", "data/text"]) == 1
    assert "nothing to compare with" in capsys.readouterr().err


def test_a_message_about_an_option_names_this_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--outptu", "x"])
    assert exit_.value.code == 2
    refused = capsys.readouterr().err
    assert "merit prepare demo --help" in refused
    assert "c4" not in refused


def test_it_needs_no_torch() -> None:
    program = "import merit_lab.data.command, sys; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
    assert finished.stdout == b"False\n"


def test_it_says_how_many_validation_sequences_there_are(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as batches of them hold."""
    assert main(["text", text, "--tokenizer", "bytes", "--validation", "0.5"]) == 0
    tokens = Dataset.open("data/text").validation
    counts = [len(validation_sequences(tokens, context, 10**9)) for context in (256, 512, 1024, 2048)]
    wanted = "{} of 256, {} of 512, {} of 1024, {} of 2048 tokens; training asks for 64".format(*counts)
    assert f"sequences for validation: {wanted}" in capsys.readouterr().out


def test_the_embedded_corpus_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one more package installed it would differ; complete data is kept."""
    assert command.make("demo", tmp_path) == 0
    calls = []
    monkeypatch.setattr(command, "main", lambda argv: calls.append(argv) or 3)
    assert command.make("embedded", tmp_path) == 0
    (tmp_path / INDEX_NAME).write_text("{}")
    assert command.make("embedded", tmp_path, "bpe-300") == 3
    assert calls == [["embedded", "--tokenizer", "bpe-300", "--out", str(tmp_path)]]
