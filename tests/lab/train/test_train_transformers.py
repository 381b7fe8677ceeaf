"""Runs of Hugging Face models: any optimizer, measurements, resuming, several ranks, export."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from test_ranks import assert_alike, on_two_ranks
from transformers_cases import TINY

from merit_lab.models import HuggingFaceConfig, find_model
from merit_lab.runs import Run
from merit_lab.train import OptimizerConfig, TrainConfig, command, train
from merit_lab.train.snapshot import Snapshot


@pytest.fixture
def folder(tmp_path):
    """Makes a folder with the configuration of a family."""

    def make(family, **settings) -> Path:
        path = tmp_path / f"my-{family}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({"model_type": family, **TINY[family], **settings}))
        return path

    return make


@pytest.fixture
def config(toy, folder):
    """The toy configuration with a Hugging Face model."""
    return lambda family, **values: replace(
        toy, **{"model": find_model(f"hf:{folder(family)}")[1], "steps": 6, **values}
    )


@pytest.mark.parametrize(
    ("family", "optimizer"), list(zip(TINY, cycle(["merit", "muon", "soap"]), strict=False))
)
def test_every_family_learns(config, family, optimizer, tmp_path):
    chosen = OptimizerConfig(name=optimizer, lr=2e-2)
    run = train(config(family, optimizer=chosen, steps=12), tmp_path / "run")
    losses = [line["loss"] for line in run.metrics("validation")]
    assert losses[-1] < losses[0] - 0.03
    (first, *_) = run.metrics("attention")
    assert len(first["max_logits"]) == len(first["entropy"]) == 2  # layers
    assert all(len(heads) == 2 for heads in first["max_logits"])


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_resumed_run_has_the_same_bits_with_dropout(config, die_before_step, measured, family, tmp_path):
    whole = train(config(family, steps=12), tmp_path / "whole")
    die_before_step(config(family, steps=12), tmp_path / "broken", 7)
    resumed = train(None, tmp_path / "broken", resume=True)
    assert "from step-00000005" in resumed.metrics("event")[1]["message"]
    assert measured(resumed) == measured(whole)


@pytest.mark.filterwarnings("ignore:no attention was observed")
def test_parameters_that_are_frozen_stay_and_unused_ones_are_named(config, folder, tmp_path):
    """One has a bias for each expert that is not trained by gradients, the other a norm that is not used."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    decoder = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    frozen = folder("llama", model_type="afmoe", **experts)
    run = train(replace(config("llama"), model=find_model(f"hf:{frozen}")[1]), tmp_path / "frozen")
    assert run.status == "finished"
    unused = find_model(f"hf:{folder('llama', model_type='trocr', **decoder)}")[1]
    with pytest.raises(ValueError, match="no part in the loss of a language model"):
        train(replace(config("llama"), model=unused), tmp_path / "unused")


def test_dropout_is_only_for_training(config, folder, tmp_path):
    with_dropout, without = (
        train(replace(config("gpt2"), model=find_model(f"hf:{folder('gpt2', **values)}")[1]), tmp_path / name)
        for name, values in (
            ("with", {}),
            ("without", dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)),
        )
    )
    first, other = (run.metrics("validation")[0]["loss"] for run in (with_dropout, without))
    assert first == other
    first, other = (run.metrics("train")[0]["loss"] for run in (with_dropout, without))
    assert first != other


def test_the_model_can_be_rebuilt_from_the_record(config, folder, tmp_path):
    chosen = config("llama")
    run = train(chosen, tmp_path / "run")
    (folder("llama") / "config.json").unlink()
    recorded = TrainConfig.from_dict(Run.open(run.folder).config)
    assert isinstance(recorded.model, HuggingFaceConfig)
    assert recorded.model == chosen.model
    assert (
        recorded.fingerprint == TrainConfig.from_dict(json.loads(json.dumps(recorded.to_dict()))).fingerprint
    )
    model = Snapshot.find(run.folder).load_model(torch.device("cpu"))
    assert not model.training


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_on_two_ranks_as_on_one(config, parallel, tmp_path):
    # Tied embeddings, no dropout: that depends on the ranks.
    chosen = config(
        "qwen2", parallel=parallel, micro_batch=2, optimizer=OptimizerConfig(name="muon-merit", lr=1e-2)
    )
    process = on_two_ranks(chosen, tmp_path / "run", step=5, how="die")
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").exists(), process.stderr[-3000:]
    assert_alike(train(None, tmp_path / "run", resume=True), train(chosen, tmp_path / "alone"))


def test_the_command_line(folder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = folder("llama")
    argv = [f"hf:{path}", "--data", str(data), "--batch", "4", "--steps", "2", "--optimizer.lr", "1e-2"]
    options = ["--model.options", "num_hidden_layers=1", "rms_norm_eps=1e-5", "--model.context", "16"]
    assert command.main([*argv, *options]) == 0
    run = Run.open(Path("runs") / "my-llama-merit-lr0.01-seed0")
    model = TrainConfig.from_dict(run.config).model
    assert (model.layers, model.context, model.configuration.rms_norm_eps) == (1, 16, 1e-5)
    assert "llama of 10.5k parameters" in run.metrics("event")[0]["message"]
    for wrong, message in (
        ([f"hf:{path}-no"], "name a folder with a config.json"),
        ([*argv, "--model.context", "64"], "has 32 positions; choose at most 32"),
        ([*argv, "--model.options", "vocab_size=64"], "but the vocabulary has 64 entries"),
        ([*argv, "--model.attention", "flash_attention_2"], "needs CUDA"),
    ):
        assert command.main([*wrong, "--out", str(tmp_path / "other")]) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
