"""Find models by name, and build them: the lab's, and those of Hugging Face's transformers.

torch is imported when it is needed, so that a command's help is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from merit_lab.models.config import PRESETS, Counts, ModelConfig
from merit_lab.models.transformers_config import AnyModelConfig, read_config
from merit_optim.spelling import did_you_mean

if TYPE_CHECKING:
    from merit_lab.models.base import Model

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
    return _count(config).parameters


def flops_per_token(config: AnyModelConfig) -> int | None:
    """Return the floating-point operations per token of a forward and backward pass; None if unknown."""
    return _count(config).flops_per_token


def _count(config: AnyModelConfig) -> Counts:
    if isinstance(config, ModelConfig):
        return config.count()
    from merit_lab.models.transformers_model import count

    return count(config)


def work_per_token(config: AnyModelConfig) -> int:
    """Return the same, or an estimate of six per parameter if unknown, to compare the length of runs."""
    return flops_per_token(config) or 6 * num_parameters(config)


def build(config: AnyModelConfig) -> Model:
    """Build the model of a configuration, with weights drawn from torch's generator."""
    if isinstance(config, ModelConfig):
        from merit_lab.models.language_model import LanguageModel

        return LanguageModel(config)
    from merit_lab.models.transformers_model import HuggingFaceModel

    return HuggingFaceModel(config)
