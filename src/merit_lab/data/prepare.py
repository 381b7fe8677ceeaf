"""A corpus to a folder of token files: part by part, resumable, and published only when complete."""

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
from merit_lab.data.pieces import Corpus, Piece
from merit_lab.data.progress import Progress
from merit_lab.data.tokenizer import Tokenizer, TokenizerFile, Tokens
from merit_lab.data.tokens import Dataset, hash_file, hash_sample

PART_BYTES = 1 << 24  # text between two entries of the journal: a second or two of work
_PUBLISHED = ("train.bin", "val.bin", "test.bin", TOKENIZER_FILE)
_WAY_OUT = "choose another --output, or replace it by --overwrite"


def prepare(
    corpus: Corpus,
    folder: Path,
    *,
    tokenizer: str,
    end_of_text: str | None = None,
    gpt2_vocabulary: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    part_bytes: int = PART_BYTES,
) -> Index:
    """Tokenize a corpus into a folder, and return its index.

    What an earlier call left unfinished is continued; what one finished is returned as it is. In both
    cases the bytes are those of a call that was never stopped. Until everything is complete the files
    stand in a folder "partial" within ``folder``.

    Args:
        corpus: what to tokenize.
        folder: where the files go.
        tokenizer: "bytes", "gpt2", "bpe-N", or the path of a tokenizer.json or its folder.
        end_of_text: the token that ends a document, of a tokenizer.json that does not say.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json.
        overwrite: replace what the folder holds, which is refused otherwise if it is something else.
        progress: what to tell about it.
        part_bytes: how much text is tokenized at a time.
    """
    given = TokenizerFile.find(tokenizer, end_of_text)
    if gpt2_vocabulary is not None and tokenizer != "gpt2":
        raise ValueError(f"GPT-2's vocabulary is given, but the tokenizer is {tokenizer!r}; leave it out")
    recipe: dict[str, Any] = {"corpus": dict(corpus.recipe), "tokenizer": tokenizer}
    if given is not None:
        recipe |= {"tokenizer": given.name, "end_of_text": given.end_of_text}
    progress = progress or Progress(quiet=True)
    existing = None if overwrite else _existing(folder, recipe, progress)
    if existing is not None:
        progress.say(f"{folder} is already prepared")
        return existing
    dtype = tokenizers.dtype_for(tokenizer) if given is None else given.dtype
    partial = folder / "partial"
    with Parts(partial, splits=corpus.splits, dtype=dtype, recipe=recipe, overwrite=overwrite) as parts:
        if parts.is_complete and (folder / INDEX_NAME).exists():
            parts.restart()  # its files were published before
        names = [f"{split}.bin" for split in corpus.splits]
        if tokenizers.has_file(tokenizer):
            names.append(TOKENIZER_FILE)
        if not overwrite:
            moved = [name for name in names if parts.is_complete and not (partial / name).exists()]
            _refuse_files_of_others(folder, except_for=moved)
        if parts.is_complete:
            _take_back(folder, partial, names)
        encoder = _make_tokenizer(given or tokenizer, gpt2_vocabulary, corpus, partial, progress)
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


def _existing(folder: Path, recipe: dict[str, Any], progress: Progress) -> Index | None:
    """The index of a folder that was prepared by the same recipe; anything else in it is refused."""
    if (folder / INDEX_NAME).exists():
        try:
            index = Index.read(folder / INDEX_NAME)
            if index.recipe == recipe:
                progress.say(f"checking what {folder} holds")
                verify(folder)
                return index
        except ValueError as error:
            raise ValueError(f"{error} (--overwrite makes everything anew)") from error
        before, now = ({**own, **own.get("corpus", {}), "corpus": None} for own in (index.recipe, recipe))
        differing = [key for key in before | now if before.get(key) != now.get(key)]
        had, asked = (", ".join(f"{key} {own.get(key)}" for key in differing) for own in (before, now))
        raise ValueError(f"{folder} holds data of another recipe, with {had}, not {asked}; {_WAY_OUT}")
    if not (folder / "partial").exists():
        _refuse_files_of_others(folder)
    return None


def _refuse_files_of_others(folder: Path, except_for: Sequence[str] = ()) -> None:
    """Raise where a folder without an index holds a file that would be replaced.

    Ours are those alone that a publication had moved there before it was stopped.
    """
    for name in _PUBLISHED:
        if name not in except_for and os.path.lexists(folder / name):
            raise ValueError(f"{folder / name} was not written by `merit prepare`; {_WAY_OUT}")


def verify(folder: Path) -> Index:
    """Read all that was prepared and raise ValueError where it is not as dataset.json says; return that."""
    dataset = Dataset.open(folder)
    dataset.verify()
    index = dataset.index
    assert index is not None, "else there is nothing to verify"
    path = folder / TOKENIZER_FILE
    if tokenizers.has_file(index.tokenizer) and not path.is_file():
        raise ValueError(f"{path} is missing; prepare the data again")
    if "end_of_text" in index.recipe and tokenizers.file_name(path) != index.tokenizer:
        raise ValueError(f"{path} was changed: it is not {index.tokenizer}; prepare the data again")
    return index


def _make_tokenizer(
    chosen: str | TokenizerFile,
    gpt2_vocabulary: Path | None,
    corpus: Corpus,
    partial: Path,
    progress: Progress,
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
                f"{chosen.path} marks the beginning of each text: a document of more than 4 to 64 KiB, which "
                "is cut into pieces, gets such a mark at each cut"
            )
        return encoder
    if not path.exists():
        progress.say(f"training a vocabulary of {tokenizers.bpe_size(chosen)} entries")
        text = tokenizers.train_bpe(_training_text(corpus), tokenizers.bpe_size(chosen))
        _write_atomically(path, text.encode())
    return tokenizers.FromFile(path)


def _training_text(corpus: Corpus) -> Iterator[bytes]:
    left = tokenizers.BPE_TRAINING_BYTES
    for piece in corpus.pieces():
        if piece.split == "train":
            _check_utf8(piece)
            yield piece.text
            left -= len(piece.text)
            if left <= 0:
                return


def _tokenize(corpus: Corpus, encoder: Tokenizer, parts: Parts, progress: Progress, part_bytes: int) -> None:
    with progress.bar(corpus.total, corpus.unit):
        progress.show(parts.counts)
        for pieces in _in_parts(corpus.pieces(parts.state), part_bytes):
            tokens, counts = _encode(pieces, encoder, corpus.splits)
            parts.append(tokens, counts, corpus.state())
            progress.show(parts.counts)
    parts.complete()


def _in_parts(pieces: Iterator[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    """Pieces in lists of some length; the corpus is not asked for more before a list is dealt with."""
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


def _encode(
    pieces: list[Piece], encoder: Tokenizer, splits: tuple[str, ...]
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


def _check_utf8(piece: Piece) -> None:
    try:
        piece.text.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(piece.origin, piece.text, error) from None


def _take_back(folder: Path, partial: Path, names: list[str]) -> None:
    """Undo a publication that was stopped in the middle."""
    for name in names:
        if not (partial / name).exists():
            (folder / name).replace(partial / name)


def _publish(folder: Path, partial: Path, names: list[str], index: Index) -> None:
    """Move complete files to their place; the index vanishes first and comes last."""
    (folder / INDEX_NAME).unlink(missing_ok=True)
    for name in _PUBLISHED:
        if name in names:
            (partial / name).replace(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    _write_atomically(folder / INDEX_NAME, index.to_json().encode())


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # else a link would be written through
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
