"""Export the tokenizer of a run as a tokenizer.json with the ids that `merit prepare` wrote."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merit_lab.data.tokenizer import END_OF_TEXT, Gpt2, file_name, has_file, read_tokenizer
from merit_lab.data.tokens import INDEX_NAME, Index
from merit_lab.runs import Run
from merit_lab.train import TrainConfig

if TYPE_CHECKING:
    import tokenizers

_GPT2_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # as tiktoken names them


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer of the tokenizers library, with the information that transformers needs."""

    name: str
    backend: tokenizers.Tokenizer
    end_of_text: int | None = None  # the id that ends documents; bytes have none

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return int(self.backend.get_vocab_size())

    @property
    def sha256(self) -> str:
        """A hash that identifies it, independent of its name."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    @property
    def prefix(self) -> int:
        """The token before a text without context: the end-of-text token, or a newline."""
        if self.end_of_text is not None:
            return self.end_of_text
        newline = self.backend.encode("\n", add_special_tokens=False).ids
        if not newline:
            raise ValueError(
                f"the tokenizer {self.name} has neither {END_OF_TEXT} nor a newline to begin a text with"
            )
        return int(newline[0])

    def write(self, folder: Path, context: int) -> None:
        """Write the files from which transformers' AutoTokenizer loads this tokenizer."""
        self.backend.save(str(folder / "tokenizer.json"))
        about: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            # Text that looks like the end-of-text token is text, as it was in the training data.
            "split_special_tokens": True,
        }
        if self.end_of_text is not None:
            token = self.backend.id_to_token(self.end_of_text)
            about |= {"bos_token": token, "eos_token": token}
            ids = {"bos_token_id": self.end_of_text, "eos_token_id": self.end_of_text}
            _write_json(folder / "generation_config.json", ids)
        _write_json(folder / "tokenizer_config.json", about)


def tokenizer_of(
    run: Run, chosen: str | None = None, gpt2_vocabulary: Path | None = None
) -> ExportedTokenizer | None:
    """Return the tokenizer of a run's data, or None if it is unknown.

    Args:
        run: its environment names the data's folder and tokenizer.
        chosen: "gpt2", "bytes" or a tokenizer.json, if the data does not name it.
        gpt2_vocabulary: a folder with GPT-2's vocab.bpe and encoder.json; None for tiktoken's cache.
    """
    data = run.environment.get("data", {})
    named = data.get("tokenizer", "unknown")
    is_known = named != "unknown"
    name = chosen or named
    if name == "unknown":
        return None
    if gpt2_vocabulary is not None and name != "gpt2":
        raise ValueError(f"GPT-2's vocabulary is given, but the tokenizer is {name!r}; leave it out")
    if chosen is not None:
        if has_file(chosen) and not Path(chosen).is_file():
            raise ValueError(
                f"the tokenizer is {chosen!r}; it must be gpt2, bytes, or a tokenizer.json that exists"
            )
        if is_known and chosen != named and not _may_be(Path(chosen), named):
            raise ValueError(
                f"the tokenizer is {chosen!r}, but that of the run's data is {named!r}; leave --tokenizer out"
            )
    if name == "bytes":
        backend = _byte_level({character: value for value, character in enumerate(_byte_characters())}, [])
    elif name == "gpt2":
        backend = _gpt2(gpt2_vocabulary)
    else:
        backend = read_tokenizer(_file_of_data(data) if chosen is None else Path(chosen))
    end_of_text = data.get("end_of_text") if is_known else None
    if end_of_text is None:
        end_of_text = backend.token_to_id(END_OF_TEXT)
    exported = ExportedTokenizer(named if is_known else Path(name).name, backend, end_of_text)
    num_rows = TrainConfig.from_dict(run.config).model.vocab_size
    if exported.vocab_size > num_rows:
        raise ValueError(
            f"the tokenizer {name} has {exported.vocab_size} entries, but the model's vocabulary has "
            f"{num_rows}: it belongs to other data"
        )
    return exported


def _file_of_data(data: Mapping[str, Any]) -> Path:
    """Return the tokenizer.json of the data, if it is still the data that the run was trained on."""
    folder = Path(data["folder"])
    path, way_out = folder / "tokenizer.json", "give the tokenizer.json of the run with --tokenizer"
    if not path.is_file() or not (folder / INDEX_NAME).is_file():
        raise ValueError(f"the run's data is missing: there is no {path} or no {INDEX_NAME}; {way_out}")
    if Index.read(folder / INDEX_NAME).fingerprint != data["fingerprint"]:
        raise ValueError(f"{folder} does not hold the data that the run was trained on; {way_out}")
    if not _may_be(path, data["tokenizer"]):
        raise ValueError(f"{path} was changed: it is not {data['tokenizer']}; {way_out}")
    return path


def _may_be(path: Path, name: str) -> bool:
    """Whether a tokenizer.json may have this name; the name of a trained one has no hash."""
    return path.is_file() and (file_name(path) == name if name.startswith("file-") else has_file(name))


def _gpt2(folder: Path | None) -> tokenizers.Tokenizer:
    """Return GPT-2's BPE, from a folder or as tiktoken finds it."""
    from tiktoken.load import read_file_cached

    Gpt2(folder)  # refuses other vocabularies, and says what to do if there is none

    def read(name: str) -> str:
        if folder is not None:
            return (folder / name).read_text(encoding="utf-8")
        return read_file_cached(_GPT2_FILES + name).decode()

    merges = [line.split(" ") for line in read("vocab.bpe").split("\n")[1:-1]]  # the first is a version
    vocabulary = json.loads(read("encoder.json"))
    del vocabulary[END_OF_TEXT]  # no merge makes it
    tokenizer = _byte_level(vocabulary, [(first, second) for first, second in merges])
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Return a BPE over bytes, written as printable characters, with GPT-2's splitting of text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """Return the character of each byte in byte-level BPE: itself if printable, else the next above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(256)
    return [chr(value if value in printable else next(others)) for value in range(256)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
