"""Export models as Hugging Face checkpoints; those of the lab do not need transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from merit_lab.models.base import Model
from merit_lab.models.config import ModelConfig
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.models.transformers_model import HuggingFaceModel

_WEIGHTS = "model.safetensors"


def check_exportable(config: AnyModelConfig) -> None:
    """Raise ValueError if Hugging Face has no such model."""
    if isinstance(config, ModelConfig) and config.qk_norm:
        raise ValueError(
            f"a {config.family} model with qk_norm has no Hugging Face architecture: neither GPT2LMHeadModel "
            "nor LlamaForCausalLM has norms on queries and keys, and without them the model would differ"
        )


def export_checkpoint(model: Model, folder: Path | str) -> None:
    """Write ``config.json`` and ``model.safetensors``, which ``AutoModelForCausalLM`` opens.

    The vocabulary keeps its padding, so that the logits are the same. GPT-2's biases, which the lab's model
    does not have, are written as zeros.

    Args:
        model: not sharded, on any device; its weights are written in their dtype.
        folder: created if needed; files of the same names are replaced.
    """
    check_exportable(model.config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A truncated file must not look like a checkpoint: the weights get their name when they are complete.
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as unfinished:
        if isinstance(model, HuggingFaceModel):
            model.export(Path(unfinished))
        else:
            assert isinstance(model, LanguageModel), "there are two kinds of models"
            _write_own(model, Path(unfinished))
        # Other files of transformers are about generation, which depends on the tokenizer.
        for name in ("config.json", _WEIGHTS):
            (Path(unfinished) / name).replace(folder / name)


def _write_own(model: LanguageModel, folder: Path) -> None:
    """Write a model of the lab with transformers' names."""
    from safetensors.torch import save_file

    config, state = model.config, model.state_dict()
    tensors = {}
    for weight_name in weight_names(config):
        weight = state[weight_name.ours].detach().cpu()
        tensors[weight_name.theirs] = (weight.T if weight_name.transposed else weight).contiguous()
    for name, size in biases(config):
        tensors[name] = torch.zeros(size, dtype=state["norm.weight"].dtype)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    dtype = str(state["norm.weight"].dtype).removeprefix("torch.")
    settings = {**settings_of(config), "dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}

# Our fields by Hugging Face's names.
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_embd": "width",
        "n_head": "heads",
        "n_layer": "layers",
        "n_positions": "context",
        "n_inner": "hidden",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tied",
    },
    "llama": {
        "vocab_size": "vocab_size",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "num_hidden_layers": "layers",
        "max_position_embeddings": "context",
        "intermediate_size": "hidden",
        "rms_norm_eps": "norm_eps",
        "tie_word_embeddings": "tied",
    },
}
# What the lab's models always do.
_FIXED: Mapping[str, Mapping[str, object]] = {
    "gpt2": {
        "activation_function": "gelu",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu"},
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
    for name, field in _FIELDS[config.family].items():
        settings[name] = ours.get(field, getattr(config, field))
    settings |= _FIXED[config.family]
    if config.family == "gpt2":
        return settings | _NO_DROPOUT
    # Twice: transformers 5 reads the second, older versions the first.
    rotary = {"rope_theta": config.rope_base}
    return settings | rotary | {"rope_parameters": {"rope_type": "default", **rotary}}


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
