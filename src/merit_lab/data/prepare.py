"""Tokenize a corpus into a folder: part by part, resumable, and complete or not to be opened."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from merit_lab.data.corpora import Corpus, Piece
from merit_lab.data.parts import NAMES, Parts, locked
from merit_lab.data.read import not_utf8
from merit_lab.data.tokenizer import (
    BPE_TRAINING_BYTES,
    Bytes,
    Chosen,
    FromFile,
    Gpt2,
    Tokenizer,
    Tokens,
    has_file,
    read_tokenizer,
    train_bpe,
)
from merit_lab.data.tokens import INDEX_NAME, TOKENIZER_NAME, Dataset, FileEntry, Index
from merit_lab.folders import refuse_file
from merit_lab.progress import WorkProgress

PART_BYTES = 1 << 24  # text between two entries in the index: a second or two of work
_WAY_OUT = "choose another --out, or replace it with --overwrite"


def prepare(
    corpus: Corpus,
    folder: Path,
    *,
    tokenizer: str,
    end_of_text: str | None = None,
    gpt2_vocabulary: Path | None = None,
    overwrite: bool = False,
    progress: WorkProgress | None = None,
    part_bytes: int = PART_BYTES,
) -> Index:
    """Tokenize a corpus into a folder, and return its index.

    An unfinished earlier call is continued, and the files of a finished one are kept. In both cases the bytes
    are those of a call that was never stopped. A folder that is not complete does not open as a `Dataset`.

    Args:
        corpus: what to tokenize.
        folder: where the files go.
        tokenizer: "bytes", "gpt2", "bpe-N", or the path of a tokenizer.json or its folder.
        end_of_text: the token that ends a document, for a tokenizer.json that does not name it.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
        overwrite: delete what the folder holds of other data; otherwise it is refused.
        progress: where to report progress.
        part_bytes: how much text is tokenized at a time.
    """
    refuse_file(folder)
    chosen = Chosen.find(tokenizer, end_of_text)
    if gpt2_vocabulary is not None and tokenizer != "gpt2":
        raise ValueError(f"GPT-2's vocabulary is given, but the tokenizer is {tokenizer!r}; leave it out")
    recipe: dict[str, Any] = {"corpus": corpus.recipe, "tokenizer": chosen.name}
    if chosen.path is not None:
        recipe["end_of_text"] = chosen.end_of_text
    progress = progress or WorkProgress(Console(quiet=True))
    with locked(folder):
        found = _found(folder, recipe, overwrite=overwrite)
        if found is not None and found.is_complete:
            progress.say(f"{folder} is already prepared; checking it")
            return verify(folder)
        parts = None
        if found is not None:
            try:
                parts = Parts.resume(folder, found)
            except ValueError:
                if not overwrite:
                    raise
        content = _tokenizer_file(chosen, corpus, parts, progress)
        encoder: Tokenizer
        if content is not None:
            encoder = FromFile(read_tokenizer(folder / TOKENIZER_NAME, content), chosen.end_of_text)
        else:
            encoder = Gpt2(gpt2_vocabulary) if chosen.name == "gpt2" else Bytes()
        begun = _begun(corpus, recipe, encoder, content)
        if parts is None:
            parts = Parts.start(folder, begun, content)
        _tokenize(corpus, encoder, parts, progress, part_bytes)
        if (done := _num_done(corpus, parts)) != corpus.total:
            Parts.start(folder, begun, content)
            raise ValueError(
                f"{done} of {corpus.total} {corpus.unit} of text are in the token files: something was "
                "changed meanwhile; start again"
            )
        progress.say("checking what was written")
        return parts.complete()


def verify(folder: Path) -> Index:
    """Read all prepared files and return their index. Raise ValueError if they do not match it."""
    return Dataset.open(folder).verify()


def _found(folder: Path, recipe: dict[str, Any], *, overwrite: bool) -> Index | None:
    """Return the index of data by this recipe, complete or to be continued; refuse any other content.

    None: start, after deleting what is there to be overwritten.
    """
    try:
        index = Index.read(folder / INDEX_NAME)
    except FileNotFoundError:
        for name in NAMES:
            if not overwrite and os.path.lexists(folder / name):
                raise ValueError(f"{folder / name} was not written by `merit prepare`; {_WAY_OUT}") from None
        return None
    except ValueError:
        if overwrite:
            return None
        raise
    if index.recipe != recipe and not overwrite:
        before, now = ({**each, **each["corpus"], "corpus": None} for each in (index.recipe, recipe))
        differing = [key for key in before | now if before.get(key) != now.get(key)]
        old, new = (", ".join(f"{key} {each.get(key)}" for key in differing) for each in (before, now))
        raise ValueError(f"{folder} holds data of another recipe, with {old}, not {new}; {_WAY_OUT}")
    is_begun = any(entry.num_tokens for entry in index.files.values())
    starts_over = index.recipe != recipe or not is_begun or (overwrite and index.is_complete)
    return None if starts_over else index


def _tokenizer_file(
    chosen: Chosen, corpus: Corpus, parts: Parts | None, progress: WorkProgress
) -> bytes | None:
    """Return the content of the data's tokenizer.json, trained here if it has to be; None without one."""
    if not has_file(chosen.name):
        return None
    if parts is not None:
        return (parts.folder / TOKENIZER_NAME).read_bytes()
    if chosen.path is not None:
        return chosen.path.read_bytes()
    size = int(chosen.name.removeprefix("bpe-"))
    progress.say(f"training a vocabulary of {size} entries")
    return train_bpe(_training_text(corpus), size).encode()


def _training_text(corpus: Corpus) -> Iterator[bytes]:
    left = BPE_TRAINING_BYTES
    for piece in corpus.pieces(corpus.begin):
        if piece.split == "train":
            _check_utf8(piece)
            yield piece.text
            left -= len(piece.text)
            if left <= 0:
                return


def _begun(corpus: Corpus, recipe: dict[str, Any], encoder: Tokenizer, content: bytes | None) -> Index:
    """Return the index of files that have no tokens yet."""
    return Index(
        recipe=recipe,
        tokenizer_sha256=None if content is None else hashlib.sha256(content).hexdigest(),
        vocab_size=encoder.vocab_size,
        end_of_text=encoder.end_of_text,
        dtype="uint16" if encoder.vocab_size <= 2**16 else "uint32",
        files={f"{split}.bin": FileEntry() for split in corpus.splits},
        position=corpus.begin,
    )


def _tokenize(
    corpus: Corpus, encoder: Tokenizer, parts: Parts, progress: WorkProgress, part_bytes: int
) -> None:
    def num_tokens() -> int:
        return sum(entry.num_tokens for entry in parts.index.files.values())

    with progress.piece("tokenizing", corpus.total, corpus.unit):
        progress.update(_num_done(corpus, parts))
        began, num_before = time.monotonic(), num_tokens()
        for pieces in _in_parts(corpus.pieces(parts.index.position), part_bytes):
            parts.append(list(zip(pieces, _encode(pieces, encoder), strict=True)), corpus.position())
            rate = (num_tokens() - num_before) / max(time.monotonic() - began, 1e-9)
            progress.update(_num_done(corpus, parts), f"{num_tokens():,} tokens, {rate:,.0f} tokens/s")


def _num_done(corpus: Corpus, parts: Parts) -> int:
    """Return how much text is in the files, in the corpus's unit."""
    entries = parts.index.files.values()
    return sum(each.num_text_bytes if corpus.unit == "bytes" else each.num_documents for each in entries)


def _in_parts(pieces: Iterator[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    """Yield lists of pieces; the corpus does not advance before a list is processed."""
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece.text)
        if size >= part_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _encode(pieces: list[Piece], encoder: Tokenizer) -> list[Tokens]:
    """Return the tokens of each piece, with one more where a document ends."""
    try:
        encoded = encoder.encode([piece.text for piece in pieces])
    except UnicodeDecodeError:
        for piece in pieces:
            _check_utf8(piece)
        raise
    if (end := encoder.end_of_text) is None:
        return encoded
    return [
        np.append(tokens, np.uint32(end)) if piece.ends else tokens
        for piece, tokens in zip(pieces, encoded, strict=True)
    ]


def _check_utf8(piece: Piece) -> None:
    try:
        piece.text.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(piece.origin, piece.text, error) from None
