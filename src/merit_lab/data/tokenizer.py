"""Text to tokens: bytes, GPT-2's BPE, or a BPE trained on the corpus."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from merit_lab.data.tokens import hash_file

END_OF_TEXT = "<|endoftext|>"
NUM_GPT2_TOKENS = 50257
BPE_TRAINING_BYTES = 1 << 26  # of training text that a BPE is trained on: the first 64 MiB
_BPE_BATCH = 64  # texts that are encoded at a time

# As tiktoken knows them: another vocabulary under the same name would be noticed.
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
        """The tokens of each text; UnicodeDecodeError where one is not UTF-8 and must be."""
        ...


def check_name(name: str) -> None:
    """Raise ValueError where there is no tokenizer of this name."""
    if name not in ("bytes", "gpt2"):
        bpe_size(name)


def dtype_for(name: str) -> str:
    """The dtype of a file of this tokenizer's tokens."""
    return "uint32" if name.startswith("bpe-") and bpe_size(name) > 2**16 else "uint16"


def bpe_size(name: str) -> int:
    """The number of entries that a name such as "bpe-4096" asks for."""
    match = re.fullmatch(r"bpe-([0-9]+)", name)
    if match is None:
        raise ValueError(
            f"the tokenizer is {name!r}; it must be 'bytes', 'gpt2', or 'bpe-N' for a BPE of N entries that "
            "is trained on the corpus, for example 'bpe-4096'"
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
        """The bytes themselves."""
        return [np.frombuffer(text, np.uint8) for text in texts]


class Gpt2:
    """GPT-2's BPE by tiktoken, on all cores.

    Args:
        vocabulary: a folder with vocab.bpe and encoder.json; without it tiktoken looks into its cache and
            downloads them if they are not there.
    """

    vocab_size = NUM_GPT2_TOKENS
    end_of_text: int | None = NUM_GPT2_TOKENS - 1

    def __init__(self, vocabulary: Path | None = None) -> None:
        encoding = _downloaded_gpt2() if vocabulary is None else _local_gpt2(vocabulary)
        self._encode: Callable[[str], NDArray[np.uint32]] = lambda text: encoding.encode_to_numpy(
            text, disallowed_special=()
        )
        # tiktoken encodes without holding the interpreter, so threads are enough.
        self._threads = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="gpt2")

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of UTF-8 texts."""
        return list(self._threads.map(self._encode, [text.decode() for text in texts]))


def _downloaded_gpt2() -> Any:
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # that of the requests package is one
        raise OSError(
            f"GPT-2's vocabulary is not in tiktoken's cache and could not be downloaded ({error}): give a "
            "folder with vocab.bpe and encoder.json (--gpt2-vocabulary), or copy the cache of another "
            "machine and name it by TIKTOKEN_CACHE_DIR"
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


class TrainedBpe:
    """A byte-level BPE with GPT-2's splitting pattern, from a tokenizer.json, by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.end_of_text: int | None = self._tokenizer.token_to_id(END_OF_TEXT)

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of UTF-8 texts."""
        decoded = [text.decode() for text in texts]
        tokens: list[Tokens] = []
        # The library keeps a hundred bytes or more for each token until a batch is done.
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
