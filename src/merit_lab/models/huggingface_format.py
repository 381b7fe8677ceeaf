"""The names of settings and weights in Hugging Face's GPT2LMHeadModel and LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from merit_lab.models.config import ModelConfig

ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

# Our fields by Hugging Face's names, with the default of an absent setting; sizes have no default.
_REQUIRED = object()
_FIELDS: Mapping[str, Mapping[str, tuple[str, object]]] = {
    "gpt2": {
        "vocab_size": ("vocab_size", _REQUIRED),
        "n_embd": ("width", _REQUIRED),
        "n_head": ("heads", _REQUIRED),
        "n_layer": ("layers", _REQUIRED),
        "n_positions": ("context", _REQUIRED),
        "n_inner": ("hidden", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "tie_word_embeddings": ("tied", True),
    },
    "llama": {
        "vocab_size": ("vocab_size", _REQUIRED),
        "hidden_size": ("width", _REQUIRED),
        "num_attention_heads": ("heads", _REQUIRED),
        "num_hidden_layers": ("layers", _REQUIRED),
        "max_position_embeddings": ("context", _REQUIRED),
        "intermediate_size": ("hidden", _REQUIRED),
        "rms_norm_eps": ("norm_eps", 1e-6),
        "tie_word_embeddings": ("tied", False),
    },
}
# What the lab's models always do, with Hugging Face's default of an absent setting.
_FIXED: Mapping[str, Mapping[str, tuple[object, object]]] = {
    "gpt2": {
        "activation_function": ("gelu", "gelu_new"),
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
        "add_cross_attention": (False, False),
    },
    "llama": {"hidden_act": ("silu", "silu")},
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def settings_of(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json, except the dtype."""
    ours = {"hidden": config.hidden_width, "tied": config.is_tied}
    settings: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        # No token is special in the lab, and Hugging Face's defaults may exceed the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    for name, (field, _) in _FIELDS[config.family].items():
        settings[name] = ours.get(field, getattr(config, field))
    settings |= {name: value for name, (value, _) in _FIXED[config.family].items()}
    if config.family == "gpt2":
        return settings | _NO_DROPOUT
    # Twice: transformers 5 reads the second, older versions the first.
    rotary = {"rope_theta": config.rope_base}
    return settings | rotary | {"rope_parameters": {"rope_type": "default", **rotary}}


def config_of(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a config.json. Raise ValueError on features that the lab's models do not have."""
    family = str(settings.get("model_type"))
    if family not in _FIELDS:
        raise ValueError(
            f"model_type is {family!r}; gpt2 (GPT2LMHeadModel) and llama (LlamaForCausalLM) can be imported"
        )
    for name, (value, absent) in _FIXED[family].items():
        if settings.get(name, absent) != value:
            raise ValueError(
                f"{name} is {settings.get(name, absent)!r}; the lab's {family} model has {value!r}"
            )
    fields: dict[str, Any] = {"family": family}
    for name, (field, absent) in _FIELDS[family].items():
        fields[field] = settings.get(name, absent)
        if fields[field] is _REQUIRED:
            raise ValueError(f"{name} is missing")
    if family == "llama":
        fields["rope_base"] = _rope_base(settings)
    config = ModelConfig(**fields)
    if family == "llama":
        _check_heads(settings, config)
    return config


def _rope_base(settings: Mapping[str, Any]) -> float:
    rotary = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    further = sorted(set(rotary) - {"rope_type", "type", "rope_theta"})
    if kind != "default" or further:
        raise ValueError(
            f"rotary positions are of type {kind!r} with settings {further}; only the plain ones, type "
            "'default' with rope_theta, can be imported"
        )
    return float(rotary.get("rope_theta", settings.get("rope_theta", 10000.0)))


def _check_heads(settings: Mapping[str, Any], config: ModelConfig) -> None:
    key_heads = settings.get("num_key_value_heads") or config.heads
    if key_heads != config.heads:
        raise ValueError(
            f"num_key_value_heads is {key_heads} for {config.heads} heads; the lab's Llama has "
            "no grouped queries"
        )
    head_width = settings.get("head_dim") or config.head_width
    if head_width != config.head_width:
        raise ValueError(f"head_dim is {head_width}; the lab's Llama has width / heads = {config.head_width}")


class WeightName(NamedTuple):
    """One weight: our name, Hugging Face's, and whether the latter stores it as (inputs, outputs)."""

    ours: str
    theirs: str
    transposed: bool = False


def weight_names(config: ModelConfig) -> Iterator[WeightName]:
    """Yield the names of every weight of the model."""
    gpt2 = config.family == "gpt2"
    yield WeightName(
        "token_embedding.weight", "transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"
    )
    if gpt2:
        yield WeightName("position_embedding.weight", "transformer.wpe.weight")
    for layer in range(config.layers):
        ours = f"blocks.{layer}"
        theirs = f"transformer.h.{layer}" if gpt2 else f"model.layers.{layer}"
        for inner, outer in (_GPT2_BLOCK if gpt2 else _LLAMA_BLOCK).items():
            is_norm = inner.endswith("norm")
            yield WeightName(
                f"{ours}.{inner}.weight", f"{theirs}.{outer}.weight", transposed=gpt2 and not is_norm
            )
    yield WeightName("norm.weight", "transformer.ln_f.weight" if gpt2 else "model.norm.weight")
    if not config.is_tied:
        yield WeightName("head.weight", "lm_head.weight")


_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def biases(config: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield GPT2LMHeadModel's biases and their sizes; LlamaForCausalLM has none."""
    if config.family != "gpt2":
        return
    sizes = {"attn.c_attn": 3 * config.width, "mlp.c_fc": config.hidden_width}
    for layer in range(config.layers):
        for outer in _GPT2_BLOCK.values():
            yield f"transformer.h.{layer}.{outer}.bias", sizes.get(outer, config.width)
    yield "transformer.ln_f.bias", config.width
