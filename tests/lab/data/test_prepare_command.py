"""`merit prepare`: from the command line to files, and its refusals."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from merit_lab import progress
from merit_lab.data import Dataset, command
from merit_lab.data.command import main
from merit_lab.data.index import INDEX_NAME
from merit_lab.data.parts import Counts
from merit_lab.data.progress import PrepareProgress


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of text in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"line %d of some text\n" % number for number in range(2000)))
    return "text"


def test_text_to_the_usual_folder(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text", text, "--tokenizer", "bytes", "--validation", "0.2"]) == 0
    dataset = Dataset.open("data/text")
    printed = capsys.readouterr().out
    assert f"{dataset.train.num_tokens:,} tokens" in printed
    assert dataset.fingerprint in printed
    assert main(["text", text, "--tokenizer", "bytes", "--validation", "0.2"]) == 0
    assert "data/text is already prepared" in capsys.readouterr().out


def test_embedded_with_a_trained_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "here")
    assert main(["embedded", "--limit", "300000", "--tokenizer", "bpe-400", "--out", output]) == 0
    dataset = Dataset.open(output)
    assert dataset.vocab_size == 400
    assert dataset.bytes_per_token is not None
    assert 1.5 < dataset.bytes_per_token < 5
    assert "training a vocabulary of 400 entries" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text"], "no files are given"),
        (["text", "nowhere"], "there is no file nowhere"),
        (["text", "text", "--tokenizer", "word"], "the tokenizer is 'word'"),
        (["text", "text", "--validation", "2"], "the share for validation is 2.0"),
        (["text", "text", "--gpt2-vocabulary", "."], "has no file vocab.bpe"),
        (["text", "text", "--tokenizer", "bytes", "--gpt2-vocabulary", "."], "the tokenizer is 'bytes'"),
        (["embedded", "--limit", "1"], "no Python sources of up to 1 bytes"),
        (["enwik8", "text"], "enwik8 has 100000000"),
        (["openwebtext", "--documents", "5"], "request more than 1997"),
    ],
)
def test_refusals(text: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Path(text).exists()
    assert main(arguments) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("merit prepare: ")
    assert message in refused
    assert not list(Path().glob("data/*/*.bin"))


def test_other_data_is_refused_with_the_way_out(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text", text, "--tokenizer", "bytes"]) == 0
    assert main(["text", text, "--tokenizer", "bytes", "--validation", "0.2"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["text", text, "--tokenizer", "bytes", "--validation", "0.2", "--overwrite"]) == 0


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


def test_interruption(text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "prepare", interrupt)
    assert main(["text", text]) == 130
    assert "run the same command again to continue" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text", "demo", "embedded", "openwebtext", "c4", "enwik8"])
def test_help_documents_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    for option in ("--out", "--tokenizer", "--gpt2-vocabulary", "--overwrite"):
        assert option in printed
    assert "bpe-N" in printed


def test_unknown_options_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["embedded", "--limt", "3"])
    assert exit_.value.code == 2
    assert "--limit" in capsys.readouterr().err


def test_a_message_about_an_option_names_this_corpus(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--outptu", "x"])
    refused = capsys.readouterr().err
    assert "--out" in refused
    assert "merit prepare demo --help" in refused
    assert "c4" not in refused


@pytest.mark.parametrize(("name", "suggestion"), [("dmeo", "did you mean 'demo'? "), ("zzz", "")])
def test_an_unknown_corpus_is_refused_with_the_nearest(
    name: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name])
    assert exit_.value.code == 2
    refused = capsys.readouterr().err
    assert f"merit prepare: unknown corpus '{name}'; {suggestion}it must be one of text, demo," in refused


def test_it_needs_no_torch() -> None:
    program = "import merit_lab.data.command, sys; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
    assert finished.stdout == b"False\n"


def shown(*, terminal: bool, unit: str = "bytes") -> str:
    output = io.StringIO()
    progress = PrepareProgress(console=Console(file=output, force_terminal=terminal, width=120))
    with progress.bar(200, unit):
        progress.show({"train": Counts(), "val": Counts()})
        progress.show({"train": Counts(num_tokens=30, num_text_bytes=90, num_documents=40), "val": Counts()})
        progress.show({"train": Counts(num_tokens=70, num_text_bytes=200, num_documents=50), "val": Counts()})
    return output.getvalue()


def test_progress_in_a_terminal_is_a_bar() -> None:
    printed = shown(terminal=True)
    assert "100%" in printed
    assert "70 tokens" in printed


def test_progress_without_a_terminal_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(terminal=False) == ""  # it took less than ten seconds
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    lines = shown(terminal=False).splitlines()
    assert lines[1].startswith("tokenizing: 45% of 200 bytes, 30 tokens, ")
    assert lines[2].startswith("tokenizing: 100% of 200 bytes, 70 tokens, ")
    assert (
        shown(terminal=False, unit="documents")
        .splitlines()[1]
        .startswith("tokenizing: 20% of 200 documents, 30 tokens")
    )


def test_the_embedded_corpus_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one more package installed it would differ; existing data is kept."""
    calls = []
    monkeypatch.setattr(command, "main", lambda argv: calls.append(argv) or 3)
    assert command.make("embedded", tmp_path, "bpe-300") == 3
    assert calls == [["embedded", "--tokenizer", "bpe-300", "--out", str(tmp_path)]]
    (tmp_path / INDEX_NAME).write_text("{}")
    assert command.make("embedded", tmp_path) == 0
    assert len(calls) == 1
