"""Models by name and by configuration: the lab's own, and those of Hugging Face's transformers."""

from __future__ import annotations

import difflib

import torch

from merit_lab.models import config as own
from merit_lab.models import transformers_model as foreign
from merit_lab.models.attention import choose
from merit_lab.models.base import AnyModelConfig, Model
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.transformers_config import read_config

_HUGGING_FACE = "hf:"

KNOWN = f"{', '.join(PRESETS)}, or {_HUGGING_FACE}FOLDER for one of Hugging Face's"
"""The models, for those who ask."""


def is_model(text: str) -> bool:
    """Whether a word names a model; whether it is there is another question."""
    return text in PRESETS or text.startswith(_HUGGING_FACE)


def find_model(text: str) -> tuple[str, AnyModelConfig]:
    """The model that a word names, and a short name for it.

    Args:
        text: a preset, or ``hf:`` with a folder that holds a config.json, with such a file, or with a name on
            the Hugging Face hub.
    """
    if text.startswith(_HUGGING_FACE):
        return read_config(text.removeprefix(_HUGGING_FACE))
    if text not in PRESETS:
        nearest = difflib.get_close_matches(text, PRESETS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ValueError(f"unknown model {text!r}; {hint}the models are: {KNOWN}")
    return text, PRESETS[text]


def build(config: AnyModelConfig) -> Model:
    """The model of a configuration, its weights drawn from torch's generator."""
    return LanguageModel(config) if isinstance(config, ModelConfig) else foreign.HuggingFaceModel(config)


def num_parameters(config: AnyModelConfig) -> int:
    """How many parameters a model has, a tied weight counted once."""
    if isinstance(config, ModelConfig):
        return own.num_parameters(config)
    return foreign.num_parameters(config)


def flops_per_token(config: AnyModelConfig) -> int | None:
    """Floating-point operations of a forward and backward pass for each token; None where not known."""
    if isinstance(config, ModelConfig):
        return own.flops_per_token(config)
    return foreign.flops_per_token(config)


def work_per_token(config: AnyModelConfig) -> int:
    """The same, or six for each parameter where it is not known: to tell long runs from short ones by."""
    return flops_per_token(config) or 6 * num_parameters(config)


def check_device(config: AnyModelConfig, device: torch.device) -> None:
    """Raise ValueError where a model cannot be on a device."""
    if isinstance(config, ModelConfig):
        choose(config.attention, device, config.head_width)
    elif config.attention.startswith("flash") and device.type != "cuda":
        raise ValueError(
            f"attention {config.attention!r} needs CUDA, and the tokens are on {device.type}; use 'auto', "
            "'sdpa' or 'eager'"
        )
