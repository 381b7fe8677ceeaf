"""GPT-2 and Llama language models that can say what their attention does."""

from merit_lab.models.config import PRESETS, ModelConfig, flops_per_token, num_parameters
from merit_lab.models.language_model import LanguageModel, Output, build
from merit_lab.models.observation import Observation

__all__ = [
    "PRESETS",
    "LanguageModel",
    "ModelConfig",
    "Observation",
    "Output",
    "build",
    "flops_per_token",
    "num_parameters",
]
