"""Tokenizers: names, lossless encoding, and text that looks like special tokens."""

import subprocess
import sys
from pathlib import Path

import pytest

from merit_lab.data.tokenizer import Chosen, FromFile, Gpt2, read_tokenizer, train_bpe
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


def test_a_trained_bpe_loses_nothing(bpe_file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = FromFile(read_tokenizer(bpe_file))
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
    with pytest.raises(ValueError, match=r"does not hold GPT-2's vocabulary.*No such file.*vocab.bpe"):
        Gpt2(tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"does not hold GPT-2's vocabulary.*Hash mismatch.*vocab.bpe"):
        Gpt2(tmp_path)


def test_gpt2_without_vocabulary_or_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    def unreachable(name: str) -> None:
        raise ConnectionError(f"no way to {name}")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(OSError, match=r"--gpt2-vocabulary.* --tokenizer bytes\. The reason: no way to gpt2$"):
        Gpt2()


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
        file = Chosen.find(str(path))
        assert file.path == their_folder / "tokenizer.json"
        assert (file.name, file.end_of_text) == (f"file-{hash_file(file.path)[:16]}", "</s>")
    assert Chosen.find(str(their_folder), "<s>").end_of_text == "<s>"
    for damaged in ("[]", "[" * 100_000):
        (their_folder / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"has no token '<\|endoftext\|>' .*--end-of-text"):
            Chosen.find(str(their_folder))
    for name in ("bytes", "gpt2", "bpe-300"):
        with pytest.raises(ValueError, match=r"the end-of-text token is '</s>', .* leave it out"):
            Chosen.find(name, "</s>")


def test_an_external_tokenizer_encodes_whole_texts_and_nothing_else(their_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = FromFile(read_tokenizer(their_folder / "tokenizer.json"), "</s>")
    library = Tokenizer.from_file(str(their_folder / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (301, library.token_to_id("</s>"))
    text = b"def decode(text):\n    return text</s>" * 3
    tokens, short = tokenizer.encode([text, b"z"])
    assert len(short) == 1
    assert library.decode(tokens.tolist(), skip_special_tokens=False).encode() == text
    assert not {300, tokenizer.end_of_text} & set(tokens.tolist())


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    for path, file in ((tmp_path, tmp_path / "tokenizer.json"), (tmp_path / "nowhere", tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=rf"{file} is no file; it must be .*save_pretrained"):
            Chosen.find(str(path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json of the tokenizers library"):
        Chosen.find(str(tmp_path))
