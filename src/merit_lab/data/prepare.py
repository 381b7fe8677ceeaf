"""Tokenize a corpus into a folder: part by part, resumable, and published only when complete."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from merit_lab.data import tokenizer as tokenizers
from merit_lab.data.formats import not_utf8
from merit_lab.data.index import INDEX_NAME, FileEntry, Index
from merit_lab.data.parts import TOKENIZER_FILE, Counts, Parts
from merit_lab.data.pieces import TextCorpus, TextPiece
from merit_lab.data.progress import PrepareProgress
from merit_lab.data.tokenizer import Tokenizer, TokenizerFile, Tokens
from merit_lab.data.tokens import Dataset, hash_file, hash_sample
from merit_lab.folders import refuse_file

PART_BYTES = 1 << 24  # text between two journal entries: a second or two of work
_PUBLISHED = ("train.bin", "val.bin", "test.bin", TOKENIZER_FILE)
_WAY_OUT = "choose another --out, or replace it with --overwrite"


def prepare(
    corpus: TextCorpus,
    folder: Path,
    *,
    tokenizer: str,
    end_of_text: str | None = None,
    gpt2_vocabulary: Path | None = None,
    overwrite: bool = False,
    progress: PrepareProgress | None = None,
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
    file = TokenizerFile.find(tokenizer, end_of_text)
    if gpt2_vocabulary is not None and tokenizer != "gpt2":
        raise ValueError(f"GPT-2's vocabulary is given, but the tokenizer is {tokenizer!r}; leave it out")
    recipe: dict[str, Any] = {"corpus": dict(corpus.recipe), "tokenizer": tokenizer}
    if file is not None:
        recipe |= {"tokenizer": file.name, "end_of_text": file.end_of_text}
    progress = progress or PrepareProgress(quiet=True)
    existing = None if overwrite else _existing(folder, recipe, progress)
    if existing is not None:
        progress.say(f"{folder} is already prepared")
        return existing
    dtype = tokenizers.dtype_for(tokenizer) if file is None else file.dtype
    partial = folder / "partial"
    with Parts(partial, splits=corpus.splits, dtype=dtype, recipe=recipe, overwrite=overwrite) as parts:
        if parts.is_complete and (folder / INDEX_NAME).exists():
            parts.restart()  # its files were already published
        names = [f"{split}.bin" for split in corpus.splits]
        if tokenizers.has_file(tokenizer):
            names.append(TOKENIZER_FILE)
        if not overwrite:
            moved = [name for name in names if parts.is_complete and not (partial / name).exists()]
            _refuse_other_files(folder, except_for=moved)
        if parts.is_complete:
            _take_back(folder, partial, names)
        encoder = _make_tokenizer(file or tokenizer, gpt2_vocabulary, corpus, partial, progress)
        if not parts.is_complete:
            _tokenize(corpus, encoder, parts, progress, part_bytes)
        for split, counts in parts.counts.items():
            if counts.num_tokens == 0:
                raise ValueError(f"the corpus has no text for {split}.bin: prepare more of it")
        progress.say("hashing")
        index = Index(
            tokenizer=recipe["tokenizer"],
            vocab_size=encoder.vocab_size,
            end_of_text=encoder.end_of_text,
            dtype=dtype,
            recipe=recipe,
            files={
                f"{split}.bin": FileEntry(
                    **asdict(counts),
                    sha256=hash_file(parts.path(split)),
                    sample_sha256=hash_sample(parts.path(split)),
                )
                for split, counts in parts.counts.items()
            },
        )
        _publish(folder, partial, names, index)
        parts.remove()
    return index


def _existing(folder: Path, recipe: dict[str, Any], progress: PrepareProgress) -> Index | None:
    """Return the index of a folder that was prepared by the same recipe; refuse any other content."""
    if (folder / INDEX_NAME).exists():
        try:
            index = Index.read(folder / INDEX_NAME)
            if index.recipe == recipe:
                progress.say(f"checking {folder}")
                verify(folder)
                return index
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


def _make_tokenizer(
    chosen: str | TokenizerFile,
    gpt2_vocabulary: Path | None,
    corpus: TextCorpus,
    partial: Path,
    progress: PrepareProgress,
) -> Tokenizer:
    if chosen == "bytes":
        return tokenizers.Bytes()
    if chosen == "gpt2":
        return tokenizers.Gpt2(gpt2_vocabulary)
    path = partial / TOKENIZER_FILE
    if isinstance(chosen, TokenizerFile):
        _write_atomically(path, chosen.path.read_bytes())
        encoder = tokenizers.FromFile(path, chosen.end_of_text)
        if encoder.notices_cuts:
            progress.say(
                f"{chosen.path} marks the beginning of each text: a long document is cut into pieces and "
                "gets such a mark at each cut"
            )
        return encoder
    if not path.exists():
        progress.say(f"training a vocabulary of {tokenizers.bpe_size(chosen)} entries")
        text = tokenizers.train_bpe(_training_text(corpus), tokenizers.bpe_size(chosen))
        _write_atomically(path, text.encode())
    return tokenizers.FromFile(path)


def _training_text(corpus: TextCorpus) -> Iterator[bytes]:
    left = tokenizers.BPE_TRAINING_BYTES
    for piece in corpus.pieces():
        if piece.split == "train":
            _check_utf8(piece)
            yield piece.text
            left -= len(piece.text)
            if left <= 0:
                return


def _tokenize(
    corpus: TextCorpus, encoder: Tokenizer, parts: Parts, progress: PrepareProgress, part_bytes: int
) -> None:
    with progress.bar(corpus.total, corpus.unit):
        progress.show(parts.counts)
        for pieces in _in_parts(corpus.pieces(parts.state), part_bytes):
            tokens, counts = _encode(pieces, encoder, corpus.splits)
            parts.append(tokens, counts, corpus.state())
            progress.show(parts.counts)
    parts.complete()


def _in_parts(pieces: Iterator[TextPiece], part_bytes: int) -> Iterator[list[TextPiece]]:
    """Yield lists of pieces; the corpus does not advance before a list is processed."""
    part: list[TextPiece] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece.text)
        if size >= part_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _encode(
    pieces: list[TextPiece], encoder: Tokenizer, splits: tuple[str, ...]
) -> tuple[dict[str, list[Tokens]], dict[str, Counts]]:
    try:
        encoded = encoder.encode([piece.text for piece in pieces])
    except UnicodeDecodeError:
        for piece in pieces:
            _check_utf8(piece)
        raise
    tokens: dict[str, list[Tokens]] = {split: [] for split in splits}
    counts = dict.fromkeys(splits, Counts())
    for piece, ids in zip(pieces, encoded, strict=True):
        tokens[piece.split].append(ids)
        num_tokens = len(ids)
        if piece.ends and encoder.end_of_text is not None:
            tokens[piece.split].append(np.array([encoder.end_of_text], np.uint32))
            num_tokens += 1
        counts[piece.split] = counts[piece.split].plus(
            Counts(num_tokens=num_tokens, num_text_bytes=len(piece.text), num_documents=int(piece.ends))
        )
    return tokens, counts


def _check_utf8(piece: TextPiece) -> None:
    try:
        piece.text.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(piece.origin, piece.text, error) from None


def _take_back(folder: Path, partial: Path, names: list[str]) -> None:
    """Undo an interrupted publication."""
    for name in names:
        if not (partial / name).exists():
            (folder / name).replace(partial / name)


def _publish(folder: Path, partial: Path, names: list[str], index: Index) -> None:
    """Move complete files to their place; the index is removed first and written last."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for name in _PUBLISHED:
        if name in names:
            (partial / name).replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    _write_atomically(folder / INDEX_NAME, index.to_json().encode())


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link, which must not be followed
    with temporary.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
