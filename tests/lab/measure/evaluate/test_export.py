"""A checkpoint as a folder that transformers opens."""

import json
from dataclasses import replace

import pytest
import torch
from run_cases import TINY, make_run, random_model

from merit_lab.measure.evaluate.export_command import main
from merit_lab.runs import FORMAT
from merit_lab.train.snapshot import Snapshot

LLAMA = replace(TINY, family="llama")


def export_to(folder, run, *options) -> int:
    return main([str(run.folder), str(folder), *options])


@pytest.mark.parametrize("model", [TINY, LLAMA], ids=["gpt2", "llama"])
def test_transformers_opens_it_with_the_same_logits(model, tmp_path, capsys) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra eval)")
    run = make_run(tmp_path / "run", model=model, steps=(10, 20))
    exported = tmp_path / "exported"
    assert export_to(exported, run) == 0
    assert "after 20 steps, with the tokenizer bytes" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
    there = transformers.AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    tokens = tokenizer("héllo world\n", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list("héllo world\n".encode())]
    here = random_model(model, seed=20)(tokens).logits
    assert here.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(there(tokens).logits, here, rtol=0, atol=1e-4)


def test_an_earlier_step(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20))
    for step in (10, 20):
        weights = Snapshot.find(run.folder, step).load_model(torch.device("cpu")).state_dict()
        for name, tensor in random_model(TINY, seed=step).state_dict().items():
            assert torch.equal(weights[name], tensor), name


def test_without_a_known_tokenizer(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", tokenizer="unknown")
    assert export_to(tmp_path / "plain", run) == 0
    assert (
        "without a tokenizer, which the run's data does not name: give --tokenizer" in capsys.readouterr().out
    )
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == ["config.json", "model.safetensors"]
    assert export_to(tmp_path / "named", run, "--tokenizer", "bytes") == 0
    assert (tmp_path / "named" / "tokenizer.json").exists()


def test_refusals(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20))
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")

    def complaint(folder, *options) -> str:
        assert export_to(folder, run, *options) == 1
        return capsys.readouterr().err

    assert f"merit export: {used} is not empty" in complaint(used)
    new = tmp_path / "new"
    assert "no checkpoint of step 15; available steps: 10, 20" in complaint(new, "--checkpoint", "15")
    for shard in run.checkpoints.glob("step-00000020/*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-8])
    assert "was changed" in complaint(new, "--checkpoint", "20")
    assert not new.exists()
    assert export_to(new, run) == 0
    assert "after 10 steps" in capsys.readouterr().out  # the newest that is whole


def test_a_configuration_that_was_edited(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    edited = {"format": FORMAT, **run.config, "seed": 7}
    (run.folder / "config.json").write_text(json.dumps(edited))
    assert export_to(tmp_path / "new", run) == 1
    assert "was written with a different configuration" in capsys.readouterr().err


def test_a_run_without_checkpoints(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    (run.checkpoints / "step-00000010").rename(run.folder / "elsewhere")
    assert export_to(tmp_path / "new", run) == 1
    assert "has no usable checkpoint: none was written yet" in capsys.readouterr().err


def test_qk_norm_has_no_architecture_there(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", model=replace(TINY, qk_norm=True))
    assert export_to(tmp_path / "new", run) == 1
    assert "qk_norm has no Hugging Face architecture" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
