"""`merit prepare`: convert text to token files, and verify them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from tyro.conf import Positional

from merit_lab.command_line import rules
from merit_lab.data import corpora
from merit_lab.data.batches import FEWEST_VALIDATION
from merit_lab.data.prepare import prepare, verify
from merit_lab.data.tokens import INDEX_NAME, Index
from merit_lab.progress import WorkProgress

_CONTEXTS = (256, 512, 1024, 2048)  # for which the validation sequences are counted
_TokenizerOption = Annotated[
    str,
    tyro.conf.arg(
        help='"bytes", "gpt2", "bpe-N" for a BPE of N entries trained on the first 64 MiB of the training '
        "text, or the path of a tokenizer.json or its folder."
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of every corpus."""

    out: Path | None = None
    """Output folder. None: data/<corpus>."""
    tokenizer: _TokenizerOption = "gpt2"
    end_of_text: str | None = None
    """The token after each document, for a tokenizer.json whose configuration does not name one."""
    gpt2_vocabulary: Path | None = None
    """A folder with GPT-2's vocab.bpe and encoder.json. None: use tiktoken's cache, or download them."""
    overwrite: bool = False
    """Delete what the output folder holds of other data, first. Otherwise it is refused."""

    def corpus(self, progress: WorkProgress) -> corpora.Corpus:
        """Return the text of this configuration."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Split(_Options):
    """Options of a corpus of which a share is for validation."""

    validation: float = 0.01
    """The share of the text for validation, between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Text(_Split):
    """Your own files or folders: text, JSON lines or Parquet, also as .gz, .zst, .xz or .bz2.

    A document is a text file, a line of a .jsonl, or a row of a .parquet. Text is UTF-8; text files may have
    any 8-bit encoding with the tokenizer "bytes". Whole documents are for validation, chosen by their
    hashes; of a single document, its end.
    """

    files: Positional[tuple[Path, ...]]
    """Files, read in this order, or folders, whose files are read in the order of their names."""
    field: str = "text"
    """The field of a JSON object, or the column of a Parquet file, that holds the text."""
    separator: str | None = None
    """A line that separates the documents of a text file, for example "<|endoftext|>"."""

    def corpus(self, progress: WorkProgress) -> corpora.Corpus:
        return corpora.text_files(
            self.files, self.validation, field=self.field, separator=self.separator, progress=progress
        )


@dataclass(frozen=True, kw_only=True)
class Demo(_Split):
    """The text of `merit demo`: 1.9 MB of Python that come with the package, the same on every machine.

    It is a fixed snapshot of merit-optim's source code.
    """

    tokenizer: _TokenizerOption = "bytes"
    validation: float = 0.05

    def corpus(self, _: WorkProgress) -> corpora.Corpus:
        return corpora.demo(self.validation)


@dataclass(frozen=True, kw_only=True)
class Embedded(_Split):
    """The Python sources of this interpreter: its standard library, then installed packages.

    Available on every machine without a download. Tests and files that are not UTF-8 are left out. The text
    depends on the installed packages; its hash is in the index.
    """

    tokenizer: _TokenizerOption = "bytes"
    limit: int = 20_000_000
    """The most bytes of source code to use."""

    def corpus(self, _: WorkProgress) -> corpora.Corpus:
        return corpora.embedded(self.limit, self.validation)


@dataclass(frozen=True, kw_only=True)
class OpenWebText(_Options):
    """OpenWebText from the Hugging Face hub, with nanoGPT's validation documents.

    About 40 GB of text and 9 billion GPT-2 tokens. Needs the package datasets.
    """

    documents: int | None = None
    """How many documents to use. None: all 8,013,769."""

    def corpus(self, _: WorkProgress) -> corpora.Corpus:
        return corpora.openwebtext(self.documents)


@dataclass(frozen=True, kw_only=True)
class C4(_Options):
    """English C4 from the Hugging Face hub: the first documents of its training and validation sets.

    Needs the package datasets.
    """

    documents: int = 20_000_000
    """How many of the 364,868,892 training documents to use; 20 million are about 9 billion GPT-2 tokens."""
    validation_documents: int = 10_000
    """How many of the 364,608 validation documents to use."""

    def corpus(self, _: WorkProgress) -> corpora.Corpus:
        return corpora.c4(self.documents, self.validation_documents)


@dataclass(frozen=True, kw_only=True)
class Enwik8(_Options):
    """The first 100 million bytes of Wikipedia: 90 for training, 5 for validation, 5 for test.bin."""

    file: Positional[Path]
    """The unzipped file."""
    tokenizer: _TokenizerOption = "bytes"

    def corpus(self, _: WorkProgress) -> corpora.Corpus:
        return corpora.Enwik8(self.file)


@dataclass(frozen=True, kw_only=True)
class Check:
    """Read all prepared files and compare them with the hashes in dataset.json.

    Training compares only a sample when it starts, which detects replaced files.
    """

    folder: Positional[Path]
    """The folder with train.bin, val.bin and dataset.json."""


_COMMANDS: dict[str, Callable[..., _Options | Check]] = {
    kind.__name__.lower(): kind for kind in (Text, Demo, Embedded, OpenWebText, C4, Enwik8, Check)
}
_DESCRIPTION = """Turn text into token files: train.bin and val.bin as nanoGPT writes them, and dataset.json
with their hashes and counts. If interrupted, the same command continues."""


def main(argv: Sequence[str]) -> int:
    """Run `merit prepare` and return its exit status."""
    chosen: _Options | Check
    how: dict[str, Any] = {"config": (tyro.conf.FlagCreatePairsOff,), "registry": rules()}
    name, *rest = argv or [""]
    if name in _COMMANDS:  # alone, so that a message about an option is about this corpus
        chosen = tyro.cli(_COMMANDS[name], prog=f"merit prepare {name}", args=rest, **how)
    else:
        chosen = tyro.extras.subcommand_cli_from_dict(
            _COMMANDS, prog="merit prepare", description=_DESCRIPTION, args=list(argv), **how
        )
    progress = WorkProgress(Console(highlight=False, soft_wrap=True))
    try:
        if isinstance(chosen, Check):
            progress.say(f"reading {chosen.folder}")
            folder, index = chosen.folder, verify(chosen.folder)
            progress.say("all files are unchanged")
        else:
            folder = chosen.out or Path("data", type(chosen).__name__.lower())
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
    progress.say(_summary(folder, index))
    return 0


def make(corpus: Literal["demo", "embedded"], folder: Path, tokenizer: str = "bytes") -> int:
    """Prepare a corpus that every machine has, unless it exists; return the exit status.

    Existing data is not checked: with one more package installed "embedded" would differ, and runs could not
    be resumed.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):  # which the command reports
        if Index.read(folder / INDEX_NAME).is_complete:
            return 0
    return main([corpus, "--tokenizer", tokenizer, "--out", str(folder)])


def _summary(folder: Path, index: Index) -> str:
    lines = [f"{folder}: tokenizer {index.tokenizer}, {index.vocab_size:,} entries, {index.dtype}"]
    num_bytes = sum(entry.num_text_bytes for entry in index.files.values())
    for name, entry in index.files.items():
        lines.append(
            f"  {name:<10} {entry.num_tokens:>15,} tokens  {entry.num_text_bytes / entry.num_tokens:.2f} "
            f"bytes per token  {entry.num_text_bytes / max(1, num_bytes):.2%} of the text, "
            + (f"{entry.num_documents:,} documents" if entry.num_documents else "part of a document")
        )
    num_tokens = index.files["val.bin"].num_tokens
    counts = ", ".join(f"{(num_tokens - 1) // context:,} of {context}" for context in _CONTEXTS)
    lines.append(f"  sequences for validation: {counts} tokens; training asks for {FEWEST_VALIDATION}")
    lines.append(f"  fingerprint {index.fingerprint}")
    return "\n".join(lines)
