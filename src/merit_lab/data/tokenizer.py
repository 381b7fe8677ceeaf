"""Tokenizers: bytes, GPT-2's BPE, a BPE trained on the corpus, or any tokenizer.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merit_lab.data.tokens import TOKENIZER_NAME, hash_file

END_OF_TEXT = "<|endoftext|>"
NUM_GPT2_TOKENS = 50257
_NAMES = ("bytes", "gpt2")  # others have a tokenizer.json
BPE_TRAINING_BYTES = 1 << 26  # a BPE is trained on the first 64 MiB of the training text
_BPE_BATCH = 64  # texts encoded at a time

# Of vocab.bpe and encoder.json, as tiktoken expects them; another vocabulary is detected.
_GPT2_HASHES = (
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
)

Tokens = NDArray[np.unsignedinteger[Any]]


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

    try:
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(folder / "vocab.bpe"), str(folder / "encoder.json"), *_GPT2_HASHES
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} does not hold GPT-2's vocabulary, vocab.bpe and encoder.json ({error})"
        ) from error
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: NUM_GPT2_TOKENS - 1},
        explicit_n_vocab=NUM_GPT2_TOKENS,
    )


def has_file(name: str) -> bool:
    """Whether data of this tokenizer comes with a tokenizer.json."""
    return name not in _NAMES


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A tokenizer as a user names it: "bytes", "gpt2", "bpe-N" or an existing tokenizer.json."""

    name: str
    """Its name in the data's index; of a file, the beginning of its hash."""
    path: Path | None = None
    end_of_text: str = END_OF_TEXT

    @classmethod
    def find(cls, text: str, end_of_text: str | None = None) -> Chosen:
        """Return the tokenizer that a name, or the path of a file or its folder, stands for.

        The default of a file's end-of-text token is that of its configuration.
        """
        match = re.fullmatch(r"bpe-([0-9]+)", text)
        if text in _NAMES or match is not None:
            if match is not None and not 257 <= int(match[1][:9]) <= 1_000_000:
                raise ValueError(
                    f"the tokenizer is {text!r}; its size must be from 257 (the bytes and the end) to 1000000"
                )
            if end_of_text is not None:
                raise ValueError(
                    f"the end-of-text token is {end_of_text!r}, but that of the tokenizer {text!r} cannot be "
                    "chosen; leave it out"
                )
            return cls(name=text)
        path = Path(text, TOKENIZER_NAME) if Path(text).is_dir() else Path(text)
        if not text or not path.is_file():
            raise ValueError(
                f"the tokenizer is {text!r}, but {path} is no file; it must be 'bytes', 'gpt2', 'bpe-N' "
                "for a BPE of N entries that is trained on the corpus, as in bpe-4096, or the path of a "
                "tokenizer.json or its folder, as save_pretrained of a fast tokenizer writes it"
            )
        token = end_of_text or _configured_end(path) or END_OF_TEXT
        if read_tokenizer(path).token_to_id(token) is None:
            raise ValueError(
                f"{path} has no token {token!r} to end documents with; choose one that it has with "
                "--end-of-text"
            )
        return cls(name=file_name(path), path=path, end_of_text=token)


def file_name(path: Path) -> str:
    """Return the name of a tokenizer.json in the index of its data."""
    return f"file-{hash_file(path)[:16]}"


def read_tokenizer(path: Path, content: bytes | None = None) -> Any:
    """Return the tokenizers.Tokenizer of a tokenizer.json, without truncation and padding.

    Its content is read, if it is not given.
    """
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_buffer(path.read_bytes() if content is None else content)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
    library.no_truncation()
    library.no_padding()
    return library


def _configured_end(path: Path) -> str | None:
    """Return the end-of-text token from the file that transformers writes next to a tokenizer.json."""
    try:
        token = json.loads(path.with_name("tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


class FromFile:
    """The tokenizer of a tokenizer.json, trained here or elsewhere, by the tokenizers library."""

    def __init__(self, library: Any, end_of_text: str = END_OF_TEXT) -> None:
        self._tokenizer = library
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = max(library.get_vocab().values()) + 1  # some ids may have no token
        self.end_of_text: int | None = library.token_to_id(end_of_text)

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


Tokenizer = Bytes | Gpt2 | FromFile
"""Encodes many texts at a time; ``end_of_text`` is the token that follows a document, if any.

Text that looks like the end-of-text token is encoded as the ordinary text it is. Text that must be UTF-8 and
is not raises UnicodeDecodeError.
"""


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
