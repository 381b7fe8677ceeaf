"""The gradient noise scale: up to which batch size a larger batch saves steps."""

from merit_lab.noise.measure import MeasuredScale, NoiseConfig, gradient_norms, measure_noise_scale
from merit_lab.noise.scale import GradientNorms, NoiseScale, noise_scale

__all__ = [
    "GradientNorms",
    "MeasuredScale",
    "NoiseConfig",
    "NoiseScale",
    "gradient_norms",
    "measure_noise_scale",
    "noise_scale",
]
