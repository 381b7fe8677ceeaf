"""A checkpoint as a folder that transformers opens."""

from dataclasses import replace

import pytest
import torch
from run_cases import TINY, make_run, random_model

from merit_lab.measure.evaluate.command import export_main


@pytest.mark.parametrize("model", [TINY, replace(TINY, family="llama")], ids=["gpt2", "llama"])
def test_transformers_opens_it_with_the_same_logits(model, tmp_path, capsys) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra eval)")
    run = make_run(tmp_path / "run", model=model, steps=(10, 20))
    exported = tmp_path / "exported"
    assert export_main([str(run.folder), str(exported)]) == 0
    assert "after 20 steps, with the tokenizer bytes" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True)
    there = transformers.AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    tokens = tokenizer("héllo world\n", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list("héllo world\n".encode())]
    here = random_model(model, seed=20)(tokens).logits
    assert here.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(there(tokens).logits, here, rtol=0, atol=1e-4)


def test_without_a_known_tokenizer(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", tokenizer="unknown")
    assert export_main([str(run.folder), str(tmp_path / "plain")]) == 0
    assert "without a tokenizer" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert export_main([str(run.folder), str(tmp_path / "named"), "--tokenizer", "bytes"]) == 0
    assert (tmp_path / "named" / "tokenizer.json").exists()


def test_the_newest_whole_checkpoint_is_exported_and_a_damaged_one_refused(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", steps=(10, 20))
    for shard in run.checkpoints.glob("step-00000020/*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-8])
    new = tmp_path / "new"
    assert export_main([str(run.folder), str(new), "--checkpoint", "20"]) == 1
    assert "was changed" in capsys.readouterr().err
    assert not new.exists()
    assert export_main([str(run.folder), str(new)]) == 0
    assert "after 10 steps" in capsys.readouterr().out


def test_qk_norm_has_no_architecture_there(tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run", model=replace(TINY, qk_norm=True))
    assert export_main([str(run.folder), str(tmp_path / "new")]) == 1
    assert "qk_norm has no Hugging Face architecture" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
