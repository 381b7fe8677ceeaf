"""Training that goes on where it stopped, whatever stopped it."""

from merit_optim.lab.train.config import (
    CheckpointConfig,
    MeasureConfig,
    OptimizerConfig,
    TrainConfig,
)
from merit_optim.lab.train.loop import train
from merit_optim.lab.train.signals import Interrupted

__all__ = [
    "CheckpointConfig",
    "Interrupted",
    "MeasureConfig",
    "OptimizerConfig",
    "TrainConfig",
    "train",
]
