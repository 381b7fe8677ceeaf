"""Language models that can report attention statistics: the lab's GPT-2 and Llama, and Hugging Face's.

Names that need torch are loaded on first use: configurations do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.names import AnyModelConfig, find_model, num_parameters
from merit_lab.models.transformers_config import HuggingFaceConfig

if TYPE_CHECKING:
    from merit_lab.models.base import Model, Output
    from merit_lab.models.language_model import LanguageModel
    from merit_lab.models.observation import AttentionObservation
    from merit_lab.models.source import build, flops_per_token

__all__ = [
    "PRESETS",
    "AnyModelConfig",
    "AttentionObservation",
    "HuggingFaceConfig",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "Output",
    "build",
    "find_model",
    "flops_per_token",
    "num_parameters",
]

__getattr__ = load_from(
    __name__,
    {
        "LanguageModel": "language_model",
        "Model": "base",
        "AttentionObservation": "observation",
        "Output": "base",
        "build": "source",
        "flops_per_token": "source",
    },
)
