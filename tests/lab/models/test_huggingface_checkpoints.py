"""Checkpoints for Hugging Face's transformers, with equal logits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_cases import GPT2, LLAMA, sequences, spread

from merit_lab.models import ModelConfig
from merit_lab.models.export import export_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra eval)")

CASES = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tied=False, hidden=77, norm_eps=1e-3),
    "gpt2-padded": replace(GPT2, width=35, heads=5).with_vocab(257),
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True, hidden=77, norm_eps=1e-3, rope_base=321.0),
    "llama-padded": replace(LLAMA, width=30, heads=5, layers=3).with_vocab(257),
}


@pytest.fixture(params=CASES)
def config(request) -> ModelConfig:
    return CASES[request.param]


def logits_there(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        return model(tokens).logits


def test_an_exported_models_logits_are_transformers(config, tmp_path) -> None:
    model = spread(config, scale=0.1)
    tokens, _ = sequences(config)
    export_checkpoint(model, tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    found = logits_there(tmp_path / "new" / "folder", tokens)
    assert found.std() > 0.1
    torch.testing.assert_close(model(tokens).logits, found, rtol=0, atol=1e-4)


def test_an_export_cut_short_does_not_pass_for_a_checkpoint(tmp_path, monkeypatch) -> None:
    export_checkpoint(spread(GPT2), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full_disk(_tensors, path, **_options) -> None:
        path.write_bytes(before[:100])
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        export_checkpoint(spread(LLAMA), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt2"
