"""Tokenizers: names, lossless encoding, and text that looks like special tokens."""

import subprocess
import sys
from pathlib import Path

import pytest

from merit_lab.data import tokenizer as tokenizers
from merit_lab.data.tokenizer import Bytes, FromFile, Gpt2, TokenizerFile, train_bpe
from merit_lab.data.tokens import hash_file

SAMPLE = [
    b"def decode(text):\n    return text.decode()\n" * 50,
    "Größe, 寸法, <|endoftext|> and  blanks \n\n".encode() * 20,
]


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(SAMPLE, 300))
    return path


@pytest.mark.parametrize(
    "name", ["", "byte", "GPT2", "bpe", "bpe-", "bpe-x", "bpe-256", "bpe-1000001", "bpe--300", "bpe-٣٠٠"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"the tokenizer is {name!r}; "):
        TokenizerFile.find(name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bytes", "uint16"), ("gpt2", "uint16"), ("bpe-65536", "uint16"), ("bpe-65537", "uint32")],
)
def test_names_decide_the_dtype(name: str, dtype: str) -> None:
    assert tokenizers.dtype_for(name) == dtype


def test_bytes() -> None:
    content = bytes(range(256))
    (tokens,) = Bytes().encode([content])
    assert tokens.tobytes() == content
    assert Bytes().end_of_text is None


def test_a_trained_bpe_loses_nothing(bpe_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = FromFile(bpe_file)
    assert tokenizer.vocab_size == 300
    library = Tokenizer.from_file(str(bpe_file))
    assert tokenizer.end_of_text == library.token_to_id("<|endoftext|>")
    unseen = "Every byte 0\x00 to \x7f and ÿ, Ж, 🦆, <|endoftext|>.".encode()
    for text, tokens in zip([*SAMPLE, unseen], tokenizer.encode([*SAMPLE, unseen]), strict=True):
        assert library.decode(tokens.tolist()).encode() == text
        assert tokenizer.end_of_text not in tokens  # the text that looks like it is ordinary text
        assert tokens.max() < tokenizer.vocab_size
    assert len(tokenizer.encode(SAMPLE)[0]) < len(SAMPLE[0]) / 3


def test_training_a_bpe_twice_gives_the_same_file(bpe_file: Path) -> None:
    """In another process, with another hash seed."""
    program = f"from merit_lab.data.tokenizer import train_bpe\nprint(train_bpe({SAMPLE!r}, 300), end='')"
    again = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
    assert again.stdout.decode() == bpe_file.read_text()


def test_gpt2_offline_is_gpt2(shared_data: Path) -> None:
    """The ids that GPT-2's authors publish, and text that looks like the end-of-text token."""
    tokenizer = Gpt2(shared_data / "gpt2_bpe")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (50257, 50256)
    hello, mark = tokenizer.encode([b"Hello world", b"<|endoftext|>"])
    assert hello.tolist() == [15496, 995]
    assert mark.tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    texts = [str(number).encode() * 3 for number in range(150)]
    alone = [tokenizer.encode([text])[0].tolist() for text in texts]
    assert [tokens.tolist() for tokens in tokenizer.encode(texts)] == alone


def test_a_wrong_gpt2_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no file vocab.bpe"):
        Gpt2(tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"vocab.bpe is not GPT-2's"):
        Gpt2(tmp_path)


def test_gpt2_without_vocabulary_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def unreachable(name: str) -> None:
        raise ConnectionError(f"no way to {name}")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(OSError, match=r"--gpt2-vocabulary.* --tokenizer bytes\. The reason: no way to gpt2$"):
        Gpt2()


def test_text_that_is_not_utf8_is_refused(bpe_file: Path) -> None:
    with pytest.raises(UnicodeDecodeError):
        FromFile(bpe_file).encode([b"\xff"])


@pytest.fixture
def their_folder(tmp_path: Path) -> Path:
    """A tokenizer saved by transformers, with truncation and a prefix token."""
    from tokenizers import AddedToken, Tokenizer, processors

    folder = tmp_path / "theirs"
    folder.mkdir()
    library = Tokenizer.from_str(train_bpe(SAMPLE, 300).replace("<|endoftext|>", "</s>"))
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 300)])
    library.enable_truncation(8)
    library.enable_padding(length=8)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<s>"}')
    return folder


def test_an_external_tokenizer_is_found(their_folder: Path) -> None:
    for path in (their_folder, their_folder / "tokenizer.json"):
        file = TokenizerFile.find(str(path))
        assert file is not None
        assert (file.path, file.end_of_text) == (their_folder / "tokenizer.json", "</s>")
        assert file.name == f"file-{hash_file(file.path)[:16]}"
        assert tokenizers.dtype_for(file) == "uint16"
    named = TokenizerFile.find(str(their_folder), "<s>")
    assert named is not None
    assert named.end_of_text == "<s>"
    config = their_folder / "tokenizer_config.json"
    config.rename(their_folder / "special_tokens_map.json").write_text('{"eos_token": "<s>"}')
    mapped = TokenizerFile.find(str(their_folder))
    assert mapped is not None
    assert mapped.end_of_text == "<s>"
    (their_folder / "special_tokens_map.json").write_text("[]")
    with pytest.raises(ValueError, match=r"has no token '<\|endoftext\|>' .*--end-of-text"):
        TokenizerFile.find(str(their_folder))
    with pytest.raises(ValueError, match=r"has no token '<nothing>' .*--end-of-text"):
        TokenizerFile.find(str(their_folder), "<nothing>")
    for name in ("bytes", "gpt2", "bpe-300"):
        assert TokenizerFile.find(name) is None
        with pytest.raises(ValueError, match=r"the end-of-text token is '</s>', .* leave it out"):
            TokenizerFile.find(name, "</s>")


def test_an_external_tokenizer_encodes_whole_texts_and_nothing_else(their_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = FromFile(their_folder / "tokenizer.json", "</s>")
    library = Tokenizer.from_file(str(their_folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (301, library.token_to_id("</s>"))
    text = b"def decode(text):\n    return text</s>" * 3
    tokens, short = tokenizer.encode([text, b"z"])
    assert len(short) == 1
    assert library.decode(tokens.tolist(), skip_special_tokens=False).encode() == text
    assert not {300, tokenizer.end_of_text} & set(tokens.tolist())


def test_a_vocabulary_with_gaps_is_as_large_as_its_largest_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 70_000}, unk_token="a")).save(str(tmp_path / "gaps.json"))
    assert FromFile(tmp_path / "gaps.json", "</s>").vocab_size == 70_001
    file = TokenizerFile.find(str(tmp_path / "gaps.json"), "</s>")
    assert file is not None
    assert tokenizers.dtype_for(file) == "uint32"


def test_a_prefix_of_each_text_is_detected(tmp_path: Path, bpe_file: Path) -> None:
    from tokenizers import Tokenizer, normalizers

    assert not FromFile(bpe_file).notices_cuts
    library = Tokenizer.from_file(str(bpe_file))
    library.normalizer = normalizers.Prepend("_")
    library.save(str(tmp_path / "marking.json"))
    assert FromFile(tmp_path / "marking.json").notices_cuts


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json is missing: .*save_pretrained"):
        TokenizerFile.find(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"nowhere'; it must be .* or the path of a tokenizer.json or its folder"
    ):
        TokenizerFile.find(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json of the tokenizers library"):
        TokenizerFile.find(str(tmp_path))
