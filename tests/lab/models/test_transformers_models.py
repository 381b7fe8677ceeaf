"""Models of Hugging Face's transformers: by folder or file, their numbers, and what is refused."""

import json
import math
import sys

import pytest
import torch
from transformers_cases import TINY

from merit_lab.models import HuggingFaceConfig, build, find_model, flops_per_token, num_parameters


def config_of(family, **values):
    return HuggingFaceConfig(settings={"model_type": family, **TINY[family]}, **{"context": 32, **values})


def folder_of(path, **settings):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_a_folder_and_its_config_json_are_the_same_model(tmp_path):
    folder = folder_of(tmp_path / "mine", model_type="gpt2", **TINY["gpt2"], _name_or_path="/elsewhere")
    name, config = find_model(f"hf:{folder}")
    assert (name, config.family, config.layers, config.context) == ("mine", "gpt2", 2, 32)
    assert find_model(f"hf:{folder / 'config.json'}") == (name, config)
    # All settings are kept, defaults too, but nothing of where they were.
    assert config.settings["activation_function"] == "gelu_new"
    assert "_name_or_path" not in config.settings


@pytest.mark.parametrize("family", TINY)
def test_loss_logits_and_attention_are_those_of_transformers(family):
    from transformers import AutoModelForCausalLM

    config = config_of(family)
    torch.manual_seed(0)
    model = build(config).eval()
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config.configuration, attn_implementation="eager").eval()
    tokens = torch.randint(256, (3, 32))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(inputs, output_attentions=True)

    output = model(inputs, targets.contiguous(), observe=True)
    torch.testing.assert_close(model(inputs).logits, expected.logits)
    torch.testing.assert_close(output.loss, theirs(tokens, labels=tokens).loss)
    probabilities = torch.stack(expected.attentions, dim=0)  # layers, batch, heads, queries, keys
    entropy = torch.special.entr(probabilities).sum(-1).mean(dim=(1, 3))
    torch.testing.assert_close(output.attention.entropy, entropy, atol=1e-5, rtol=1e-5)
    assert output.attention.max_logits.shape == (2, 2)
    plain = model(inputs, targets.contiguous())
    assert plain.attention is None
    assert torch.equal(plain.loss, output.loss)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # in torch's own code
def test_compiled_it_is_watched_too():
    torch.manual_seed(0)
    model = build(config_of("llama"))
    tokens = torch.randint(256, (3, 32))
    expected = model(tokens, tokens, observe=True)
    model.compile(backend="aot_eager")
    found = model(tokens, tokens, observe=True)
    torch.testing.assert_close(found.attention, expected.attention)
    for output in (found, model(tokens, tokens)):
        torch.testing.assert_close(output.loss, expected.loss)


@pytest.mark.parametrize("family", TINY)
def test_counts(family):
    config = config_of(family)
    model = build(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    looked_up = (
        [] if config.configuration.tie_word_embeddings else [model.model.get_input_embeddings().weight]
    )
    if family == "gpt2":
        looked_up.append(model.model.transformer.wpe.weight)
    multiplied = num_parameters(config) - sum(weight.numel() for weight in looked_up)
    assert flops_per_token(config) == 6 * multiplied + 12 * 2 * 16 * 32


def test_flops_count_the_experts_of_a_token_and_are_unknown_without_attention():
    sizes = {**TINY["llama"], "model_type": "mixtral", "num_local_experts": 4}
    all_of_them, one = (
        HuggingFaceConfig(settings={**sizes, "num_experts_per_tok": number}, context=32) for number in (4, 1)
    )
    assert num_parameters(all_of_them) == num_parameters(one)
    experts = 2 * 4 * 3 * 16 * 32  # layers, experts, matrices
    assert flops_per_token(all_of_them) - flops_per_token(one) == 6 * experts * 3 // 4
    mamba = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    assert flops_per_token(HuggingFaceConfig(settings=mamba)) is None


def test_options_change_settings_and_what_follows_from_them(tmp_path):
    folder = folder_of(tmp_path / "qwen", model_type="qwen2", **TINY["qwen2"])
    _, config = find_model(f"hf:{folder}")
    assert len(config.settings["layer_types"]) == 2  # written out, as all that follows
    changed = HuggingFaceConfig(settings=config.settings, options=("num_hidden_layers=3", "hidden_size=8"))
    with pytest.raises(ValueError, match="1024, but the qwen2 model has 32 positions; choose at most 32"):
        _ = changed.layers
    changed = HuggingFaceConfig(settings=config.settings, options=changed.options, context=8)
    assert (changed.layers, changed.attention_width) == (3, 8)
    assert len(changed.configuration.layer_types) == 3
    assert len(build(changed).sharded_parts()) == 3
    with pytest.raises(ValueError, match=r"num_hiden_layers, which a qwen2 .* nearest are num_hidden_layers"):
        _ = HuggingFaceConfig(settings=config.settings, options=("num_hiden_layers=3",), context=8).layers
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        HuggingFaceConfig(settings=config.settings, options=("layers",))
    with pytest.raises(ValueError, match=r"model\.context is 16777217; it must be at most 16777216"):
        HuggingFaceConfig(settings=config.settings, context=2**24 + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "bert"}, "a bert model is not a causal language model"),
        ({"model_type": "t5"}, "a t5 model is not a causal language model"),
        ({"model_type": "bart"}, "a bart model is not a causal language model"),
        ({"model_type": "gtp2"}, "does not know; did you mean 'gpt2'"),
        ({"hidden_size": 3}, "has no model_type"),
        ({"model_type": ["gpt2"]}, "has no model_type"),
        ({"model_type": "gpt2", "n_embd": int("9" * 400)}, "transformers cannot build the gpt2 model"),
        (
            {"model_type": "llama", "hidden_size": 15, "num_attention_heads": 2},
            "transformers refuses the llama",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, settings, message):
    folder = folder_of(tmp_path / "model", **settings)
    with pytest.raises(ValueError, match=message):
        num_parameters(find_model(f"hf:{folder}")[1])


def test_infinities_of_a_configuration_are_numbers(tmp_path):
    """Transformers writes them in a notation of its own, which JSON has."""
    settings = {"model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1}
    folder = folder_of(tmp_path / "model", **settings, **heads)
    _, config = find_model(f"hf:{folder}")
    assert tuple(config.configuration.time_step_limit) == (0.0, math.inf)
    assert num_parameters(config) > 0


def test_a_model_whose_layers_differ_in_their_heads(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8, "intermediate_size": 64}
    folder = folder_of(tmp_path / "model", model_type="gemma4_text", vocab_size=256, **sizes, **small)
    _, config = find_model(f"hf:{folder}")
    assert config.attention_width is None
    assert num_parameters(config) > 0


def test_what_is_not_there_is_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match=f"hf:{path}: there is no .*; name a folder with a config.json"):
            find_model(f"hf:{path}")
    for text in ("{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="is not JSON"):
            find_model(f"hf:{tmp_path}")
    with pytest.raises(ValueError, match="unknown model 'tinny'; did you mean 'tiny'"):
        find_model("tinny")
    with pytest.raises(ValueError, match=f"a folder with a configuration: write hf:{tmp_path}; the models"):
        find_model(str(tmp_path))


def test_without_transformers_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'merit-optim\[hf\]'"):
        find_model(f"hf:{tmp_path}")


def test_the_vocabulary_must_hold_the_data():
    config = config_of("gpt2")
    assert config.with_vocab(200) is config
    with pytest.raises(ValueError, match=r"257 tokens, but the gpt2 model has 256; .* vocab_size=257"):
        config.with_vocab(257)
