"""Training that goes on where it stopped, whatever stopped it."""

from merit_lab.train.config import (
    CheckpointConfig,
    MeasureConfig,
    OptimizerConfig,
    TrainConfig,
)
from merit_lab.train.loop import train
from merit_lab.train.signals import Interrupted

__all__ = [
    "CheckpointConfig",
    "Interrupted",
    "MeasureConfig",
    "OptimizerConfig",
    "TrainConfig",
    "train",
]
