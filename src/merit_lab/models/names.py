"""Find models by name. Does not import torch, so that a command's help is fast."""

from __future__ import annotations

from pathlib import Path

from merit_lab.models import config as lab
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.transformers_config import HuggingFaceConfig, read_config
from merit_optim.spelling import did_you_mean

AnyModelConfig = ModelConfig | HuggingFaceConfig
"""A model of the lab, or one of Hugging Face's transformers."""

_HUGGING_FACE = "hf:"

KNOWN = f"{', '.join(PRESETS)}, or {_HUGGING_FACE}FOLDER for one of Hugging Face's"
"""The models, for messages."""


def is_model(text: str) -> bool:
    """Whether a word has the form of a model's name; it need not exist."""
    return text in PRESETS or text.startswith(_HUGGING_FACE)


def find_model(text: str) -> tuple[str, AnyModelConfig]:
    """Return a short name of a model, and its configuration.

    Args:
        text: a preset, or ``hf:`` with a folder that holds a config.json, with such a file, or with a name on
            the Hugging Face hub.
    """
    if text.startswith(_HUGGING_FACE):
        return read_config(text.removeprefix(_HUGGING_FACE))
    if text not in PRESETS:
        hint = did_you_mean(text, PRESETS, otherwise=";")
        if Path(text, "config.json").is_file():
            hint = f", but a folder with a configuration: write {_HUGGING_FACE}{text};"
        raise ValueError(f"unknown model {text!r}{hint} the models are: {KNOWN}")
    return text, PRESETS[text]


def num_parameters(config: AnyModelConfig) -> int:
    """Return the number of parameters; a tied weight counts once."""
    if isinstance(config, ModelConfig):
        return lab.num_parameters(config)
    from merit_lab.models import transformers_model as huggingface

    return huggingface.num_parameters(config)
