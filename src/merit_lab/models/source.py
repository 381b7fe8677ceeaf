"""Build models from configurations: the lab's, and those of Hugging Face's transformers."""

from __future__ import annotations

import torch

from merit_lab.models import config as lab
from merit_lab.models import transformers_model as huggingface
from merit_lab.models.attention import choose
from merit_lab.models.base import Model
from merit_lab.models.config import ModelConfig
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.names import AnyModelConfig, num_parameters


def build(config: AnyModelConfig) -> Model:
    """Build the model of a configuration, with weights drawn from torch's generator."""
    return LanguageModel(config) if isinstance(config, ModelConfig) else huggingface.HuggingFaceModel(config)


def flops_per_token(config: AnyModelConfig) -> int | None:
    """Return the floating-point operations per token of a forward and backward pass; None if unknown."""
    if isinstance(config, ModelConfig):
        return lab.flops_per_token(config)
    return huggingface.flops_per_token(config)


def work_per_token(config: AnyModelConfig) -> int:
    """Return the same, or an estimate of six per parameter if unknown, to compare the length of runs."""
    return flops_per_token(config) or 6 * num_parameters(config)


def check_device(config: AnyModelConfig, device: torch.device) -> None:
    """Raise ValueError if a device does not support a model."""
    if isinstance(config, ModelConfig):
        choose(config.attention, device, config.head_width)
    elif config.attention.startswith("flash") and device.type != "cuda":
        raise ValueError(
            f"attention {config.attention!r} needs CUDA, but the tokens are on {device.type}; use 'auto', "
            "'sdpa' or 'eager'"
        )
