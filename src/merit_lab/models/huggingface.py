"""Export models as Hugging Face checkpoints; those of the lab do not need transformers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from merit_lab.models.base import Model
from merit_lab.models.config import ModelConfig
from merit_lab.models.huggingface_format import biases, settings_of, weight_names
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.names import AnyModelConfig
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
