"""Training runs that can be resumed after any interruption.

Names that need torch are loaded on first use, so that `merit train --help` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merit_lab.lazy import load_from
from merit_lab.train.config import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.signals import Interrupted

if TYPE_CHECKING:
    from merit_lab.train.loop import train
    from merit_lab.train.pool import Pool

__all__ = [
    "CheckpointConfig",
    "Interrupted",
    "MeasureConfig",
    "OptimizerConfig",
    "Pool",
    "TrainConfig",
    "train",
]

__getattr__ = load_from(__name__, {"Pool": "pool", "train": "loop"})
