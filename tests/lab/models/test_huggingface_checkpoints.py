"""Checkpoints to and from Hugging Face's transformers, with equal logits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_cases import GPT2, LLAMA, sequences, spread
from safetensors.torch import load_file, save_file

from merit_lab.models import ModelConfig
from merit_lab.models.huggingface import export_checkpoint, import_checkpoint

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


def test_an_exported_model_comes_back_as_it_was(config, tmp_path) -> None:
    model = spread(config, scale=0.1)
    export_checkpoint(model, tmp_path)
    back = import_checkpoint(tmp_path)
    assert back.config == replace(config, hidden=config.hidden_width, tied=config.is_tied)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert all(p.requires_grad for p in back.parameters())


def there(tmp_path: Path, architecture: str, **settings) -> Path:
    """A random model saved by transformers."""
    torch.manual_seed(3)
    if architecture == "gpt2":
        sizes = {"n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": 24, "activation_function": "gelu"}
        config = transformers.GPT2Config(vocab_size=101, **(sizes | settings))
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 77}
        config = transformers.LlamaConfig(vocab_size=101, max_position_embeddings=24, **(sizes | settings))
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("gpt2", {}),
        ("gpt2", {"n_inner": 77, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 321.0}}),
        ("llama", {"dtype": "bfloat16"}),
    ],
)
def test_an_imported_models_logits_are_transformers(architecture, settings, tmp_path) -> None:
    folder = there(tmp_path, architecture, **settings)
    tokens, _ = sequences(GPT2)
    model = import_checkpoint(folder)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=0, atol=1e-4)


def test_a_checkpoint_in_several_files_is_read(tmp_path) -> None:
    folder = there(tmp_path, "llama")
    tokens, _ = sequences(LLAMA)
    expected = import_checkpoint(folder)(tokens).logits
    tensors = load_file(folder / "model.safetensors")
    halves = {"a.safetensors": list(tensors)[::2], "b.safetensors": list(tensors)[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert torch.equal(import_checkpoint(folder)(tokens).logits, expected)


def test_names_of_older_versions_are_understood(tmp_path) -> None:
    """GPT2Model's names have no prefix, and masks once stood among the weights."""
    export_checkpoint(spread(GPT2), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(import_checkpoint(tmp_path).norm.weight, spread(GPT2).norm.weight)


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
    assert import_checkpoint(tmp_path).config.family == "gpt2"


# Refusals


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_qk_norm_has_no_architecture_there(family, tmp_path) -> None:
    with pytest.raises(ValueError, match="with qk_norm has no Hugging Face architecture"):
        export_checkpoint(spread(replace(family, qk_norm=True)), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (GPT2, {"model_type": "bert"}, "model_type is 'bert'; gpt2 .* and llama .* can be imported"),
        (GPT2, {"activation_function": "gelu_new"}, "activation_function is 'gelu_new'; .* has 'gelu'"),
        (GPT2, {"activation_function": None}, "activation_function is 'gelu_new'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2, {"n_embd": None}, "n_embd is missing"),
        (GPT2, {"n_head": 7}, "width 48 is not a multiple of heads 7"),
        (LLAMA, {"num_key_value_heads": 1}, "num_key_value_heads is 1 for 3 heads"),
        (LLAMA, {"head_dim": 32}, "head_dim is 32"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "type 'llama3' .*'factor'"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic"}}, "type 'dynamic'"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        (
            LLAMA,
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "type 'linear'",
        ),
    ],
)
def test_settings_of_another_model_are_refused(family, changes, message, tmp_path) -> None:
    export_checkpoint(spread(family), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | changes
    settings = {name: value for name, value in settings.items() if name not in changes or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"config\.json cannot be imported: .*{message}"):
        import_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "transformer.h.1.mlp.c_fc.bias",
            torch.full((192,), 0.25),
            r"mlp\.c_fc\.bias .* not zero \(up to 0\.25\)",
        ),
        (
            "transformer.h.2.ln_1.weight",
            torch.ones(48),
            r"a weight 'h\.2\.ln_1\.weight' that a gpt2 model does not",
        ),
        ("transformer.h.1.ln_1.weight", None, r"no weight 'transformer\.h\.1\.ln_1\.weight'"),
    ],
)
def test_weights_of_another_model_are_refused(name, tensor, message, tmp_path) -> None:
    export_checkpoint(spread(GPT2), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: tensor}
    save_file({n: t for n, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path)


def test_damaged_and_pickled_weights_are_refused(tmp_path) -> None:
    export_checkpoint(spread(GPT2), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        import_checkpoint(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .* can run code"):
        import_checkpoint(tmp_path)
