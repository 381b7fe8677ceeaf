"""Text to tokens: bytes, GPT-2's BPE, a BPE trained on the corpus, or any tokenizer.json."""

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
    if name not in _NAMES:
        bpe_size(name)


def has_file(name: str) -> bool:
    """Whether a tokenizer.json belongs to data of this tokenizer."""
    return name not in _NAMES


def dtype_for(name: str) -> str:
    """The dtype of a file of this tokenizer's tokens."""
    return "uint16" if name in _NAMES else _dtype(bpe_size(name))


def _dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


def bpe_size(name: str) -> int:
    """The number of entries that a name such as "bpe-4096" asks for."""
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


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer.json that exists, and which of its tokens ends a document."""

    path: Path
    end_of_text: str

    @classmethod
    def find(cls, given: str, end_of_text: str | None = None) -> TokenizerFile | None:
        """The file that is given, itself or as the folder it is in; None where a name of ours is given.

        The end-of-text token is that of the file's configuration if none is named.
        """
        path = Path(given)
        if given in _NAMES or re.fullmatch(_BPE_NAME, given) or not path.exists() or not given:
            check_name(given)
            if end_of_text is not None:
                raise ValueError(
                    f"an end-of-text token is named, {end_of_text!r}, but the tokenizer {given!r} has its "
                    "own, or none; leave it out"
                )
            return None
        if path.is_dir():
            path /= "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} is missing: the tokenizers library writes it, as does transformers' save_pretrained "
                "of a fast tokenizer"
            )
        library = read_tokenizer(path)
        token = end_of_text or _configured_end(path) or END_OF_TEXT
        if library.token_to_id(token) is None:
            raise ValueError(
                f"{path} has no token {token!r} to end documents with; name one that it has with "
                "--end-of-text"
            )
        return cls(path=path, end_of_text=token)

    @property
    def name(self) -> str:
        """What the data's index calls it: the beginning of its hash."""
        return file_name(self.path)

    @property
    def dtype(self) -> str:
        """The dtype of a file of its tokens."""
        return _dtype(FromFile(self.path, self.end_of_text).vocab_size)


def file_name(path: Path) -> str:
    """What data made with a tokenizer.json call it."""
    return f"file-{hash_file(path)[:16]}"


def read_tokenizer(path: Path) -> Any:
    """A tokenizers.Tokenizer from a tokenizer.json, without the limits that models set for one text."""
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no other
        raise ValueError(f"{path} is not a tokenizer.json of the tokenizers library ({error})") from error
    library.no_truncation()
    library.no_padding()
    return library


def _configured_end(path: Path) -> str | None:
    """The end-of-text token by the files that transformers writes beside a tokenizer.json."""
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
        """Whether text has other tokens in pieces than as a whole, as where each text gets a mark."""
        pieces = [b"Text that is cut", b" between two words"]
        whole, *parts = self.encode([b"".join(pieces), *pieces])
        return not np.array_equal(whole, np.concatenate(parts))

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
