"""Export models as Hugging Face checkpoints; those of the lab do not need transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from merit_lab.models.base import Model
from merit_lab.models.config import Family, ModelConfig
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

    gpt2, tensors = model.config.family == "gpt2", {}
    for name, weight in model.state_dict().items():
        theirs = _their_name(name, model.config.family)
        weight = weight.detach().cpu()
        if gpt2 and "embedding" not in name and name != "head.weight":
            tensors[f"{theirs}.bias"] = weight.new_zeros(len(weight))
            weight = weight.T if weight.ndim == 2 else weight  # GPT-2 stores (inputs, outputs)
        tensors[f"{theirs}.weight"] = weight.contiguous()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    dtype = str(weight.dtype).removeprefix("torch.")
    settings = {**_settings(model.config), "dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _their_name(weight: str, family: Family) -> str:
    """Return Hugging Face's name of the module with a weight."""
    names, module = _NAMES[family], weight.removesuffix(".weight")
    if not module.startswith("blocks."):
        return names[module]
    blocks, layer, inner = module.split(".", 2)
    return f"{names[blocks]}.{layer}.{names[inner]}"


_NAMES: Mapping[Family, Mapping[str, str]] = {
    "gpt2": {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "blocks": "transformer.h",
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": {
        "token_embedding": "model.embed_tokens",
        "blocks": "model.layers",
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    },
}


def _settings(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json, except the dtype."""
    both = {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.is_tied,
        # No token is special in the lab, and Hugging Face's defaults may exceed the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.family == "gpt2":
        return both | {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": config.width,
            "n_head": config.heads,
            "n_layer": config.layers,
            "n_positions": config.context,
            "n_inner": config.hidden_width,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        }
    rotary = {"rope_theta": config.rope_base}
    return both | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "max_position_embeddings": config.context,
        "intermediate_size": config.hidden_width,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        # Twice: transformers 5 reads the second, older versions the first.
        **rotary,
        "rope_parameters": {"rope_type": "default", **rotary},
    }
