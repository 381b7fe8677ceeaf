"""Models by configuration: the lab's own, and those of Hugging Face's transformers."""

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
    """The model of a configuration, its weights drawn from torch's generator."""
    return LanguageModel(config) if isinstance(config, ModelConfig) else huggingface.HuggingFaceModel(config)


def flops_per_token(config: AnyModelConfig) -> int | None:
    """Floating-point operations of a forward and backward pass for each token; None where not known."""
    if isinstance(config, ModelConfig):
        return lab.flops_per_token(config)
    return huggingface.flops_per_token(config)


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
