"""Training that goes on where it stopped, whatever stopped it."""

from merit_lab.train.config import (
    CheckpointConfig,
    MeasureConfig,
    OptimizerConfig,
    TrainConfig,
)
from merit_lab.train.loop import Bar, train
from merit_lab.train.signals import Interrupted

__all__ = [
    "Bar",
    "CheckpointConfig",
    "Interrupted",
    "MeasureConfig",
    "OptimizerConfig",
    "TrainConfig",
    "train",
]
