"""Language models that can say what their attention does: the lab's GPT-2 and Llama, and Hugging Face's."""

from merit_lab.models.base import AnyModelConfig, Model, Output
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.language_model import LanguageModel
from merit_lab.models.observation import Observation
from merit_lab.models.source import build, find_model, flops_per_token, num_parameters
from merit_lab.models.transformers_config import HuggingFaceConfig

__all__ = [
    "PRESETS",
    "AnyModelConfig",
    "HuggingFaceConfig",
    "LanguageModel",
    "Model",
    "ModelConfig",
    "Observation",
    "Output",
    "build",
    "find_model",
    "flops_per_token",
    "num_parameters",
]
