"""Checkpoints in Hugging Face's format; those of the lab's models do not need transformers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from merit_lab.models.base import Model
from merit_lab.models.config import ModelConfig
from merit_lab.models.huggingface_format import biases, config_of, settings_of, weight_names
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.names import AnyModelConfig
from merit_lab.models.transformers_model import HuggingFaceModel

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Masks and frequencies that older versions of transformers stored with the weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


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


def import_checkpoint(folder: Path | str) -> LanguageModel:
    """Return the model of a GPT2LMHeadModel or LlamaForCausalLM checkpoint, in float32.

    Features that the lab's models do not have (nonzero biases, grouped queries, scaled rotary positions,
    another activation) are refused: the logits would differ. Only safetensors files are read, so no code in
    them is run.
    """
    folder = Path(folder)
    try:
        config = config_of(json.loads((folder / "config.json").read_text()))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} cannot be imported: {error}") from error
    theirs = {
        name.removeprefix("transformer."): tensor
        for name, tensor in _read_weights(folder).items()
        if not name.endswith(_BUFFERS)
    }
    weights = {}
    for weight_name in weight_names(config):
        # GPT2Model alone, without its head, leaves the prefix out.
        name = weight_name.theirs.removeprefix("transformer.")
        if name not in theirs:
            raise ValueError(f"{folder} has no weight {weight_name.theirs!r}, which its config.json asks for")
        tensor = theirs.pop(name)
        weights[weight_name.ours] = tensor.T if weight_name.transposed else tensor
    if config.is_tied:
        theirs.pop("lm_head.weight", None)  # the embedding again
    for name, tensor in theirs.items():
        if not name.endswith(".bias"):
            raise ValueError(f"{folder} has a weight {name!r} that a {config.family} model does not have")
        if tensor.any():
            raise ValueError(
                f"{name} in {folder} is not zero (up to {tensor.abs().max():.3g}); the lab's models have no "
                "biases, so the logits would differ. Only models trained without biases can be imported, "
                "such as the lab's"
            )
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device="cpu")
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of the checkpoint, from one file or from several with an index."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = {_WEIGHTS}
    if not (folder / _WEIGHTS).exists():
        if not (folder / _INDEX).exists():
            raise FileNotFoundError(
                f"{folder} has neither {_WEIGHTS} nor {_INDEX}; pickled weights (.bin, .pt) are not read, "
                "since they can run code: save the model with safe_serialization=True"
            )
        names = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    tensors: dict[str, Tensor] = {}
    for name in sorted(names):
        try:
            tensors |= load_file(folder / name)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from error
    return tensors
