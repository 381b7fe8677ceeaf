"""Tokenizers: bytes, GPT-2's BPE, a BPE trained on the corpus, or any tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from merit_lab.data.tokens import hash_file

END_OF_TEXT = "<|endoftext|>"
NUM_GPT2_TOKENS = 50257
_NAMES = ("bytes", "gpt2")  # others have a tokenizer.json
_BPE_NAME = r"bpe-([0-9]+)"
BPE_TRAINING_BYTES = 1 << 26  # a BPE is trained on the first 64 MiB of the training text
_BPE_BATCH = 64  # texts encoded at a time

# The hashes that tiktoken expects; another vocabulary under the same name is detected.
_GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}

Tokens = NDArray[np.uint8] | NDArray[np.uint32]


class Tokenizer(Protocol):
    """Encodes many texts at a time; ``end_of_text`` is the token that follows a document, if any.

    Text that looks like the end-of-text token is encoded as the ordinary text it is.
    """

    vocab_size: int
    end_of_text: int | None

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text. Raise UnicodeDecodeError if a text must be UTF-8 and is not."""
        ...


def has_file(name: str) -> bool:
    """Whether data of this tokenizer comes with a tokenizer.json."""
    return name not in _NAMES


def dtype_for(chosen: str | TokenizerFile) -> str:
    """Return the dtype of token files of this tokenizer."""
    if isinstance(chosen, TokenizerFile):
        size = FromFile(chosen.path, chosen.end_of_text).vocab_size
    else:
        size = bpe_size(chosen) if has_file(chosen) else 0
    return "uint16" if size <= 2**16 else "uint32"


def bpe_size(name: str) -> int:
    """Return the number of entries in a name such as "bpe-4096"."""
    match = re.fullmatch(_BPE_NAME, name)
    if match is None:
        raise ValueError(
            f"the tokenizer is {name!r}; it must be 'bytes', 'gpt2', 'bpe-N' for a BPE of N entries that is "
            "trained on the corpus, for example 'bpe-4096', or the path of a tokenizer.json or its folder"
        )
    size = int(match[1])
    if not 257 <= size <= 1_000_000:
        raise ValueError(
            f"the tokenizer is {name!r}; its size must be from 257 (the bytes and the end) to 1000000"
        )
    return size


class Bytes:
    """Every byte is a token. Nothing marks the end of a document."""

    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes themselves."""
        return [np.frombuffer(text, np.uint8) for text in texts]


class Gpt2:
    """GPT-2's BPE from tiktoken, on all cores.

    Args:
        vocabulary: a folder with vocab.bpe and encoder.json; without it tiktoken uses its cache or downloads
            them.
    """

    vocab_size = NUM_GPT2_TOKENS
    end_of_text: int | None = NUM_GPT2_TOKENS - 1

    def __init__(self, vocabulary: Path | None = None) -> None:
        encoding = _downloaded_gpt2() if vocabulary is None else _local_gpt2(vocabulary)
        self._encode: Callable[[str], NDArray[np.uint32]] = lambda text: encoding.encode_to_numpy(
            text, disallowed_special=()
        )
        # tiktoken releases the GIL, so threads are enough.
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gpt2")

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of UTF-8 texts."""
        return list(self._threads.map(self._encode, [text.decode() for text in texts]))


def _downloaded_gpt2() -> Any:
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # errors of the requests package are OSErrors
        raise OSError(
            "GPT-2's vocabulary is not in tiktoken's cache and could not be downloaded: give a folder with "
            "vocab.bpe and encoder.json (--gpt2-vocabulary), or copy the cache of another machine and set "
            "TIKTOKEN_CACHE_DIR to it, or take another tokenizer, as in --tokenizer bpe-16384 or "
            f"--tokenizer bytes. The reason: {error}"
        ) from error


def _local_gpt2(folder: Path) -> Any:
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str  # type: ignore[import-untyped]

    for name, sha256 in _GPT2_FILES.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no file {name}; GPT-2's vocabulary is vocab.bpe and encoder.json")
        if hash_file(folder / name) != sha256:
            raise ValueError(f"{folder / name} is not GPT-2's: its sha256 is not {sha256}")
    vocab, encoder = (str(folder / name) for name in _GPT2_FILES)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=data_gym_to_mergeable_bpe_ranks(vocab, encoder),
        special_tokens={END_OF_TEXT: NUM_GPT2_TOKENS - 1},
        explicit_n_vocab=NUM_GPT2_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """An existing tokenizer.json, and its token that ends a document."""

    path: Path
    end_of_text: str

    @classmethod
    def find(cls, tokenizer: str, end_of_text: str | None = None) -> TokenizerFile | None:
        """Find a file by its path or folder; None if ``tokenizer`` is one of our names.

        The default of the end-of-text token is that of the file's configuration.
        """
        path = Path(tokenizer)
        if tokenizer in _NAMES or re.fullmatch(_BPE_NAME, tokenizer) or not path.exists() or not tokenizer:
            if has_file(tokenizer):
                bpe_size(tokenizer)  # refuses other names
            if end_of_text is not None:
                raise ValueError(
                    f"the end-of-text token is {end_of_text!r}, but that of the tokenizer {tokenizer!r} "
                    "cannot be chosen; leave it out"
                )
            return None
        if path.is_dir():
            path /= "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: write it with the tokenizers library, or with transformers' "
                "save_pretrained of a fast tokenizer"
            )
        library = read_tokenizer(path)
        token = end_of_text or _configured_end(path) or END_OF_TEXT
        if library.token_to_id(token) is None:
            raise ValueError(
                f"{path} has no token {token!r} to end documents with; choose one that it has with "
                "--end-of-text"
            )
        return cls(path=path, end_of_text=token)

    @property
    def name(self) -> str:
        """Its name in the data's index: the beginning of its hash."""
        return file_name(self.path)


def file_name(path: Path) -> str:
    """Return the name of a tokenizer.json in the index of its data."""
    return f"file-{hash_file(path)[:16]}"


def read_tokenizer(path: Path) -> Any:
    """Read a tokenizers.Tokenizer from a tokenizer.json, without truncation and padding."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
    library.no_truncation()
    library.no_padding()
    return library


def _configured_end(path: Path) -> str | None:
    """Return the end-of-text token from the files that transformers writes next to a tokenizer.json."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token = json.loads(path.with_name(name).read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


class FromFile:
    """A tokenizer from a tokenizer.json, trained here or elsewhere, by the tokenizers library."""

    def __init__(self, path: Path, end_of_text: str = END_OF_TEXT) -> None:
        self._tokenizer = read_tokenizer(path)
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1  # some ids may have no token
        self.end_of_text: int | None = self._tokenizer.token_to_id(end_of_text)

    @property
    def notices_cuts(self) -> bool:
        """Whether cutting text changes its tokens, for example because each text gets a prefix."""
        pieces = [b"Text that is cut", b" between two words"]
        whole, *parts = self.encode([b"".join(pieces), *pieces])
        return not np.array_equal(whole, np.concatenate(parts))

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of UTF-8 texts."""
        decoded = [text.decode() for text in texts]
        tokens: list[Tokens] = []
        # The library uses a hundred bytes or more per token until a batch is done.
        for begin in range(0, len(decoded), _BPE_BATCH):
            batch = decoded[begin : begin + _BPE_BATCH]
            encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            tokens += [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return tokens


def train_bpe(texts: Iterable[bytes], size: int) -> str:
    """Train a BPE of up to ``size`` entries, and return it as the text of a tokenizer.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return str(tokenizer.to_str(pretty=True))
