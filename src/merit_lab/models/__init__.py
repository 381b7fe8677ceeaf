"""Language models that can report attention statistics: the lab's GPT-2 and Llama, and Hugging Face's.

Names that need torch are loaded on first use: configurations do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.names import build, find_model, flops_per_token, num_parameters
from merit_lab.models.transformers_config import AnyModelConfig, HuggingFaceConfig

if TYPE_CHECKING:
    from merit_lab.models.base import AttentionObservation, Model, Output
    from merit_lab.models.language_model import LanguageModel

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

_NEED_TORCH = {"LanguageModel": "language_model"} | dict.fromkeys(
    ("AttentionObservation", "Model", "Output"), "base"
)
__getattr__ = load_from(__name__, _NEED_TORCH)
