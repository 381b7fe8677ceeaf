"""Tokenize a corpus into a folder: part by part, resumable, and published only when complete."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from merit_lab.data import tokenizer as tokenizers
from merit_lab.data.corpora import Corpus, Piece
from merit_lab.data.parts import TOKENIZER_FILE, Parts, open_parts, write_atomically
from merit_lab.data.read import not_utf8
from merit_lab.data.tokenizer import Chosen, Tokenizer, Tokens
from merit_lab.data.tokens import INDEX_NAME, Dataset, FileEntry, Index, fingerprint, hash_file, hash_sample
from merit_lab.folders import refuse_file
from merit_lab.json_values import build
from merit_lab.progress import WorkProgress

PART_BYTES = 1 << 24  # text between two journal entries: a second or two of work
_PUBLISHED = ("train.bin", "val.bin", "test.bin", TOKENIZER_FILE)
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
    are those of a call that was never stopped. Until everything is complete the files are in the subfolder
    "partial" of ``folder``.

    Args:
        corpus: what to tokenize.
        folder: where the files go.
        tokenizer: "bytes", "gpt2", "bpe-N", or the path of a tokenizer.json or its folder.
        end_of_text: the token that ends a document, for a tokenizer.json that does not name it.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
        overwrite: replace the contents of the folder; otherwise other contents are refused.
        progress: where to report progress.
        part_bytes: how much text is tokenized at a time.
    """
    refuse_file(folder)
    chosen = Chosen.find(tokenizer, end_of_text)
    if gpt2_vocabulary is not None and tokenizer != "gpt2":
        raise ValueError(f"GPT-2's vocabulary is given, but the tokenizer is {tokenizer!r}; leave it out")
    recipe: dict[str, Any] = {"corpus": dict(corpus.recipe), "tokenizer": chosen.name}
    if chosen.path is not None:
        recipe["end_of_text"] = chosen.end_of_text
    progress = progress or WorkProgress(Console(quiet=True))
    existing = None if overwrite else _existing(folder, recipe, progress)
    if existing is not None:
        progress.say(f"{folder} is already prepared")
        return existing
    encoder: Tokenizer | None = None
    if chosen.name == "bytes":
        encoder = tokenizers.Bytes()
    elif chosen.name == "gpt2":
        encoder = tokenizers.Gpt2(gpt2_vocabulary)  # refuses what it cannot find before anything is written
    names = [f"{split}.bin" for split in corpus.splits]
    names += [TOKENIZER_FILE] * tokenizers.has_file(chosen.name)
    dtype = "uint16" if chosen.size <= 2**16 else "uint32"
    partial = folder / "partial"
    with open_parts(partial, splits=corpus.splits, dtype=dtype, recipe=recipe, overwrite=overwrite) as parts:
        # Of complete files, an interrupted publication may have moved some. They go on unless they are lost.
        moved = [name for name in names if parts.index is not None and not (partial / name).exists()]
        if moved and (overwrite or not all((folder / name).exists() for name in moved)):
            parts.restart()
            moved = []
        if not overwrite:
            _refuse_other_files(folder, except_for=moved)
        if parts.index is None:
            encoder = encoder or _from_file(chosen, corpus, partial, progress)
            _tokenize(corpus, encoder, parts, progress, part_bytes)
            progress.say("checking what was written")
            parts.complete(asdict(_index(encoder, parts, recipe)))
        index = build(Index, parts.index)
        _publish(folder, partial, names, index)
        parts.remove()
    return index


def verify(folder: Path) -> Index:
    """Read all prepared files and return their index. Raise ValueError if they do not match it."""
    dataset = Dataset.open(folder)
    dataset.verify()
    index = dataset.index
    assert index is not None, "verified above"
    path = folder / TOKENIZER_FILE
    if tokenizers.has_file(index.tokenizer) and not path.is_file():
        raise ValueError(f"{path} is missing; prepare the data again")
    if "end_of_text" in index.recipe and tokenizers.file_name(path) != index.tokenizer:
        raise ValueError(f"{path} was changed: it is not {index.tokenizer}; prepare the data again")
    return index


def _existing(folder: Path, recipe: dict[str, Any], progress: WorkProgress) -> Index | None:
    """Return the index of a folder that was prepared by the same recipe; refuse any other content."""
    if (folder / INDEX_NAME).exists():
        try:
            index = Index.read(folder / INDEX_NAME)
            if index.recipe == recipe:
                progress.say(f"checking {folder}")
                return verify(folder)
        except ValueError as error:
            raise ValueError(f"{error} (--overwrite recreates everything)") from error
        before, now = ({**each, **each.get("corpus", {}), "corpus": None} for each in (index.recipe, recipe))
        differing = [key for key in before | now if before.get(key) != now.get(key)]
        old, new = (", ".join(f"{key} {each.get(key)}" for key in differing) for each in (before, now))
        raise ValueError(f"{folder} holds data of another recipe, with {old}, not {new}; {_WAY_OUT}")
    if not (folder / "partial").exists():
        _refuse_other_files(folder)
    return None


def _refuse_other_files(folder: Path, except_for: Sequence[str] = ()) -> None:
    """Raise ValueError if a folder without an index holds a file that would be replaced.

    ``except_for`` are our files, which an interrupted publication had already moved there.
    """
    for name in _PUBLISHED:
        if name not in except_for and os.path.lexists(folder / name):
            raise ValueError(f"{folder / name} was not written by `merit prepare`; {_WAY_OUT}")


def _from_file(chosen: Chosen, corpus: Corpus, partial: Path, progress: WorkProgress) -> Tokenizer:
    """Return a tokenizer from a copy of its file, or from the one that is trained here."""
    path = partial / TOKENIZER_FILE
    if chosen.path is not None:
        write_atomically(path, chosen.path.read_bytes())
    elif not path.exists():
        progress.say(f"training a vocabulary of {chosen.size} entries")
        text = tokenizers.train_bpe(_training_text(corpus), chosen.size)
        write_atomically(path, text.encode())
    return tokenizers.FromFile(path, chosen.end_of_text)


def _training_text(corpus: Corpus) -> Iterator[bytes]:
    left = tokenizers.BPE_TRAINING_BYTES
    for piece in corpus.pieces():
        if piece.split == "train":
            _check_utf8(piece)
            yield piece.text
            left -= len(piece.text)
            if left <= 0:
                return


def _tokenize(
    corpus: Corpus, encoder: Tokenizer, parts: Parts, progress: WorkProgress, part_bytes: int
) -> None:
    def done() -> int:
        all_counts = parts.counts.values()
        return sum(
            each.num_text_bytes if corpus.unit == "bytes" else each.num_documents for each in all_counts
        )

    with progress.piece("tokenizing", corpus.total, corpus.unit):
        progress.update(done())
        began, num_tokens_now = time.monotonic(), 0
        for pieces in _in_parts(corpus.pieces(parts.state), part_bytes):
            tokens = _encode(pieces, encoder, corpus.splits)
            for piece in pieces:
                parts.counts[piece.split].num_text_bytes += len(piece.text)
                parts.counts[piece.split].num_documents += piece.ends
            parts.append(tokens, corpus.state())
            num_tokens_now += sum(len(array) for arrays in tokens.values() for array in arrays)
            rate = num_tokens_now / max(time.monotonic() - began, 1e-9)
            num_tokens = sum(counts.num_tokens for counts in parts.counts.values())
            progress.update(done(), f"{num_tokens:,} tokens, {rate:,.0f} tokens/s")
    if done() != corpus.total:
        raise ValueError(
            f"{done()} of {corpus.total} {corpus.unit} of text are in the token files: something was changed "
            f"meanwhile; {parts.way_out}"
        )


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


def _encode(pieces: list[Piece], encoder: Tokenizer, splits: Sequence[str]) -> dict[str, list[Tokens]]:
    """Return the tokens for each split, with a token after each document."""
    try:
        encoded = encoder.encode([piece.text for piece in pieces])
    except UnicodeDecodeError:
        for piece in pieces:
            _check_utf8(piece)
        raise
    tokens: dict[str, list[Tokens]] = {split: [] for split in splits}
    for piece, ids in zip(pieces, encoded, strict=True):
        tokens[piece.split].append(ids)
        if piece.ends and encoder.end_of_text is not None:
            tokens[piece.split].append(np.array([encoder.end_of_text], np.uint32))
    return tokens


def _check_utf8(piece: Piece) -> None:
    try:
        piece.text.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(piece.origin, piece.text, error) from None


def _index(encoder: Tokenizer, parts: Parts, recipe: dict[str, Any]) -> Index:
    """Return the index of complete files, after comparing them with what was written."""
    files = {}
    for split, counts in parts.counts.items():
        path = parts.path(split)
        if counts.num_tokens == 0:
            raise ValueError(f"the corpus has no text for {split}.bin: prepare more of it")
        parts.check(split)
        files[path.name] = FileEntry(
            num_tokens=counts.num_tokens,
            num_text_bytes=counts.num_text_bytes,
            num_documents=counts.num_documents,
            sha256=hash_file(path),
            sample_sha256=hash_sample(path),
        )
    return Index(
        fingerprint=fingerprint(files["train.bin"].sha256, files["val.bin"].sha256),
        tokenizer=recipe["tokenizer"],
        vocab_size=encoder.vocab_size,
        end_of_text=encoder.end_of_text,
        dtype="uint16" if parts.dtype.itemsize == 2 else "uint32",
        recipe=recipe,
        files=files,
    )


def _publish(folder: Path, partial: Path, names: list[str], index: Index) -> None:
    """Move complete files to their place; the index is removed first and written last."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for name in _PUBLISHED:
        if name not in names:
            (folder / name).unlink(missing_ok=True)
        elif (partial / name).exists():
            (partial / name).replace(folder / name)
    write_atomically(folder / INDEX_NAME, index.to_json())
