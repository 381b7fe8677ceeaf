"""`merit prepare`: text to token files, and whether they are still what they were."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from tyro.conf import Positional

from merit_lab.data.index import INDEX_NAME, Index
from merit_lab.data.pieces import Corpus
from merit_lab.data.prepare import prepare, verify
from merit_lab.data.progress import Progress

_TokenizerOption = Annotated[
    str,
    tyro.conf.arg(
        help='"bytes", "gpt2", "bpe-N" for a BPE of N entries trained on the first 64 MiB of the training '
        "text, or the path of a tokenizer.json or of the folder it is in."
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Options(ABC):
    """What every corpus has in common."""

    name: ClassVar[str]

    output: Path | None = None
    """Where the files go; data/<corpus> if not given."""
    tokenizer: _TokenizerOption = "gpt2"
    end_of_text: str | None = None
    """The token after each document, if the tokenizer is a tokenizer.json whose configuration names none."""
    gpt2_vocabulary: Path | None = None
    """A folder with GPT-2's vocab.bpe and encoder.json; else tiktoken's cache is used, or a download."""
    overwrite: bool = False
    """Replace what the output folder holds; otherwise other data there are refused."""

    @abstractmethod
    def corpus(self, progress: Progress) -> Corpus:
        """The text of this configuration."""


@dataclass(frozen=True, kw_only=True)
class Text(_Options):
    """Files of your own, or folders of them: text, JSON lines or Parquet, also as .gz, .zst, .xz or .bz2.

    A document is a text file, a line of a .jsonl, or a row of a .parquet. Text is UTF-8; with the tokenizer
    "bytes" text files may have any encoding of 8 bits. Documents are cut into pieces of 4 to 64 KiB and the
    hash of a piece decides whether it is for validation.
    """

    name = "text"
    files: Positional[tuple[Path, ...]]
    """The files, in the order they are to be read; of a folder all below it, in the order of their names."""
    field: str = "text"
    """The field of a JSON object, or the column of a Parquet file, that holds the text."""
    separator: str | None = None
    """A line that stands between the documents of a text file, for example "<|endoftext|>"."""
    validation: float = 0.01
    """The share of the text that is for validation, between 0 and 1."""

    def corpus(self, progress: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data.corpora import text_files
        from merit_lab.data.documents import Layout

        layout = Layout(field=self.field, separator=self.separator)
        return text_files(self.files, self.validation, layout, progress)


@dataclass(frozen=True, kw_only=True)
class Demo(_Options):
    """The text of `merit demo`, 1.9 MB of Python that come with the package: the same on every machine.

    It is merit-optim's own source code as it once was, and stays so when that changes.
    """

    name = "demo"
    tokenizer: _TokenizerOption = "bytes"
    validation: float = 0.05
    """The share of the text that is for validation, between 0 and 1."""

    def corpus(self, _: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data.corpora import demo

        return demo(self.validation)


@dataclass(frozen=True, kw_only=True)
class Embedded(_Options):
    """The Python sources of this interpreter: its standard library, then installed packages.

    A corpus that every machine has, without a download. Tests are left out, as is what is no UTF-8. It
    changes with what is installed; its hash is in the index.
    """

    name = "embedded"
    tokenizer: _TokenizerOption = "bytes"
    limit: int = 20_000_000
    """How many bytes of sources to take at most."""
    validation: float = 0.01
    """The share of the text that is for validation, between 0 and 1."""

    def corpus(self, _: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data.corpora import embedded

        return embedded(self.limit, self.validation)


@dataclass(frozen=True, kw_only=True)
class OpenWebText(_Options):
    """OpenWebText from the Hugging Face hub, with the validation documents that nanoGPT takes.

    About 40 GB of text and 9 billion tokens of GPT-2's. Needs the package datasets.
    """

    name = "openwebtext"
    documents: int | None = None
    """Take only the first documents of the 8,013,769."""

    def corpus(self, _: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data.streams import openwebtext

        return openwebtext(self.documents)


@dataclass(frozen=True, kw_only=True)
class C4(_Options):
    """English C4 from the Hugging Face hub: its first documents, and of its own validation set.

    Needs the package datasets.
    """

    name = "c4"
    documents: int = 20_000_000
    """How many training documents to take of 364,868,892; 20 million are about 9 billion GPT-2 tokens."""
    validation_documents: int = 10_000
    """How many validation documents to take, of 364,608."""

    def corpus(self, _: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data.streams import c4

        return c4(self.documents, self.validation_documents)


@dataclass(frozen=True, kw_only=True)
class Enwik8(_Options):
    """The first 100 million bytes of Wikipedia: 90 for training, 5 for validation, 5 for test.bin."""

    name = "enwik8"
    file: Positional[Path]
    """The unpacked file."""
    tokenizer: _TokenizerOption = "bytes"

    def corpus(self, _: Progress) -> Corpus:
        """The text of this configuration."""
        from merit_lab.data import corpora

        return corpora.Enwik8(self.file)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Read all of what was prepared and compare it with the hashes in its dataset.json.

    When training starts, a sample is compared, which finds files that were replaced.
    """

    name: ClassVar[str] = "check"
    folder: Positional[Path]
    """The folder with train.bin, val.bin and dataset.json."""


_COMMANDS: dict[str, Callable[..., _Options | Check]] = {
    kind.name: kind for kind in (Text, Demo, Embedded, OpenWebText, C4, Enwik8, Check)
}


def main(argv: Sequence[str]) -> int:
    """Run `merit prepare` and return its exit status."""
    chosen: _Options | Check = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="merit prepare",
        description="Turn text into token files: train.bin and val.bin as nanoGPT writes them, and "
        "dataset.json with their hashes and counts. A call that was stopped goes on where it was.",
        args=list(argv),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    progress = Progress()
    try:
        if isinstance(chosen, Check):
            progress.say(f"reading {chosen.folder}")
            folder, index = chosen.folder, verify(chosen.folder)
            progress.say("all bytes are as they were prepared")
        else:
            folder = chosen.output or Path("data", chosen.name)
            index = prepare(
                chosen.corpus(progress),
                folder,
                tokenizer=chosen.tokenizer,
                end_of_text=chosen.end_of_text,
                gpt2_vocabulary=chosen.gpt2_vocabulary,
                overwrite=chosen.overwrite,
                progress=progress,
            )
    except (ImportError, OSError, ValueError) as error:
        print(f"merit prepare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("merit prepare: interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    progress.say(_summary(folder, index))
    return 0


def make(corpus: Literal["demo", "embedded"], folder: Path, tokenizer: str = "bytes") -> int:
    """Prepare a corpus that every machine has, unless it is there; return the exit status.

    What is there is taken as it is: with one more package installed "embedded" would be another, and runs
    could not go on.
    """
    if (folder / INDEX_NAME).exists():
        return 0
    return main([corpus, "--tokenizer", tokenizer, "--output", str(folder)])


def _summary(folder: Path, index: Index) -> str:
    lines = [f"{folder}: tokenizer {index.tokenizer}, {index.vocab_size:,} entries, {index.dtype}"]
    for name, entry in index.files.items():
        lines.append(
            f"  {name:<10} {entry.num_tokens:>15,} tokens  {entry.num_text_bytes / entry.num_tokens:.2f} "
            f"bytes a token  {entry.num_documents:,} documents"
        )
    lines.append(f"  fingerprint {index.fingerprint}")
    return "\n".join(lines)
