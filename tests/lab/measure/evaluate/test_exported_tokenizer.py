"""The exported tokenizer gives the ids that `merit prepare` wrote."""

import dataclasses
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_cases import TINY, make_run

from merit_lab.data import Dataset
from merit_lab.data.corpora import text_files
from merit_lab.data.prepare import prepare
from merit_lab.data.tokenizer import END_OF_TEXT, Bytes, FromFile, Gpt2, read_tokenizer, train_bpe
from merit_lab.measure.evaluate.tokenizer import ExportedTokenizer, tokenizer_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra eval)")

HARD_TEXTS = [
    "",
    " ",
    "a  b\n\n\tc   ",
    f"{END_OF_TEXT} in a text is <|pad|> text {END_OF_TEXT}",
    "don't 'LL they've it's 'S 3.14 1,000",
    "\u0120\u010a\u00ad\u2028\u00a0\ufeff\u0000",
    "Straße, naïve, ǅ, 漢字かな, \U0001f469\u200d\U0001f467, עברית",
]


def opened(exported: ExportedTokenizer, folder: Path):
    """What transformers makes of the exported files."""
    folder.mkdir()
    exported.write(folder, context=10_000)
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    exported = tokenizer_of(make_run(folder / "run"))
    assert exported is not None
    assert exported.vocab_size == 256
    assert exported.end_of_text is None
    return opened(exported, folder / "exported")


@given(text=st.text())
def test_bytes_are_bytes(byte_tokenizer, text) -> None:
    ids = byte_tokenizer(text)["input_ids"]
    assert ids == Bytes().encode([text.encode()])[0].tolist()
    assert byte_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Python sources with a BPE of their own."""
    folder = tmp_path_factory.mktemp("bpe") / "data"
    files = [Path(sysconfig.get_path("stdlib"), name) for name in ("this.py", "abc.py", "bisect.py")]
    prepare(text_files(files, 0.3), folder, tokenizer="bpe-400")
    return folder


def bpe_run(folder: Path, data: Path, **changes):
    fingerprint = changes.pop("fingerprint", Dataset.open(data).fingerprint)
    model = dataclasses.replace(TINY, vocab_size=448)
    return make_run(folder, model=model, tokenizer="bpe-400", data=data, fingerprint=fingerprint)


def documents(tokens: np.ndarray, end: int) -> list[list[int]]:
    places = np.flatnonzero(tokens == end)
    return [part.tolist() for part in np.split(tokens[: places[-1]], places[:-1] + 1)]


def test_a_trained_bpe_gives_the_ids_in_the_files(prepared, tmp_path) -> None:
    exported = tokenizer_of(bpe_run(tmp_path / "run", prepared))
    assert exported is not None
    tokenizer = opened(exported, tmp_path / "exported")
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == exported.end_of_text == exported.prefix
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": exported.end_of_text, "eos_token_id": exported.end_of_text}
    dataset = Dataset.open(prepared)
    num_compared = 0
    for file in (dataset.train, dataset.validation):
        for ids in documents(np.asarray(file.tokens), tokenizer.eos_token_id):
            if ids:
                text = tokenizer.decode(ids)
                assert tokenizer(text[:1000])["input_ids"][:200] == ids[:200]
                num_compared += 1
    assert num_compared >= 3
    encoder = FromFile(read_tokenizer(prepared / "tokenizer.json"))
    for text in HARD_TEXTS:
        assert tokenizer(text)["input_ids"] == encoder.encode([text.encode()])[0].tolist(), text


def test_an_external_tokenizer_is_exported_with_its_end_token(tmp_path) -> None:
    """Also from where it is now, if it is the same file."""
    theirs = tmp_path / "theirs.json"
    theirs.write_text(train_bpe([b"some text"], 270).replace(END_OF_TEXT, "</s>"))
    data = tmp_path / "data"
    files = [Path(sysconfig.get_path("stdlib"), name) for name in ("this.py", "abc.py", "bisect.py")]
    index = prepare(text_files(files, 0.3), data, tokenizer=str(theirs), end_of_text="</s>")
    run = make_run(
        tmp_path / "run",
        model=dataclasses.replace(TINY, vocab_size=320),
        tokenizer=index.tokenizer,
        data=data,
        fingerprint=index.fingerprint,
    )
    run.environment["data"]["end_of_text"] = index.end_of_text  # as `merit train` records it
    for number, named in enumerate((None, str(theirs))):
        exported = tokenizer_of(run, named)
        assert exported is not None
        assert (exported.name, exported.prefix) == (index.tokenizer, index.end_of_text)
        tokenizer = opened(exported, tmp_path / f"exported-{number}")
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", index.end_of_text)
        encoder = FromFile(read_tokenizer(theirs), "</s>")
        for text in [*HARD_TEXTS, "a</s>b"]:
            assert tokenizer(text)["input_ids"] == encoder.encode([text.encode()])[0].tolist(), text
    for path in (theirs, data / "tokenizer.json"):
        path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match=r"theirs.json', but that of the run's data is 'file-"):
        tokenizer_of(run, str(theirs))
    with pytest.raises(ValueError, match=r"tokenizer.json was changed: it is not file-.* --tokenizer"):
        tokenizer_of(run)


def test_gpt2_gives_tiktokens_ids(shared_data, task_files, tmp_path) -> None:
    model = dataclasses.replace(TINY, width=2, heads=1, vocab_size=50304)
    run = make_run(tmp_path / "run", model=model, tokenizer="unknown")
    vocabulary = shared_data / "gpt2_bpe"
    exported = tokenizer_of(run, "gpt2", vocabulary)
    assert exported is not None
    assert exported.vocab_size == 50257
    assert exported.end_of_text == 50256
    tokenizer = opened(exported, tmp_path / "exported")
    real = (task_files / "wikitext2" / "wiki.test.raw").read_text()[:200_000]
    sets = (task_files / "lambada" / "lambada_test.jsonl").read_text()[:100_000]
    everything = "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x20000)]))
    texts = [*HARD_TEXTS, real, sets, everything]
    for text, ids in zip(texts, Gpt2(vocabulary).encode([text.encode() for text in texts]), strict=True):
        assert tokenizer(text)["input_ids"] == ids.tolist(), text[:50]


def test_refusals(prepared, tmp_path) -> None:
    run = make_run(tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"'gpt2', but that of the run's data is 'bytes'"):
        tokenizer_of(run, "gpt2")
    with pytest.raises(ValueError, match=r"'bpe', but that of the run|json', but that of the run"):
        tokenizer_of(run, str(prepared / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"'gpt-2'; it must be gpt2, bytes"):
        tokenizer_of(run, "gpt-2")
    with pytest.raises(ValueError, match="vocabulary is given, but the tokenizer is 'bytes'"):
        tokenizer_of(run, gpt2_vocabulary=tmp_path)
    foreign = make_run(tmp_path / "foreign", tokenizer="unknown")
    with pytest.raises(ValueError, match="400 entries, but the model's vocabulary has 256"):
        tokenizer_of(foreign, str(prepared / "tokenizer.json"))


def test_data_that_moved_or_changed(prepared, tmp_path) -> None:
    changed = bpe_run(tmp_path / "changed", prepared, fingerprint="another")
    with pytest.raises(ValueError, match="does not hold the data that the run was trained on"):
        tokenizer_of(changed)
    found = tokenizer_of(changed, str(prepared / "tokenizer.json"))
    assert found is not None
    assert found.vocab_size == 400
    # What an evaluation's result follows from is the same, so that it is not computed again.
    beside = tokenizer_of(bpe_run(tmp_path / "same", prepared))
    assert beside is not None
    assert (found.name, found.sha256) == (beside.name, beside.sha256)
    changed.environment["data"]["folder"] = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"tokenizer\.json or no dataset\.json; give"):
        tokenizer_of(changed)
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer\.json"):
        tokenizer_of(changed, str(broken))
