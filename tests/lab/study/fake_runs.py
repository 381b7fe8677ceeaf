"""Runs with losses by a formula in place of training."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from merit_lab.data import Dataset
from merit_lab.runs import MetricsWriter, Run
from merit_lab.study.fields import value_of
from merit_lab.train import TrainConfig

SMALL = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]
SHORT = [*SMALL, "--batch=4", "--steps=8", "--measure.validation-sequences=64"]
BEST = {"adamw": 2e-3, "merit": 1e-2, "muon": 1.6e-2, "muon-merit": 8e-2}
FLOOR = {"adamw": 3.0, "merit": 2.8, "muon": 2.5, "muon-merit": 2.2}

Loss = Callable[[TrainConfig], float]


def valley(config: TrainConfig) -> float:
    """Lowest at the best rate, a momentum or a first beta of 0.9; seeds differ slightly; far up: NaN."""
    name, lr = config.optimizer.name, config.optimizer.lr
    assert lr is not None
    if lr > 30 * BEST.get(name, 1e-2):
        return math.nan
    betas = value_of(config, "optimizer.betas") or (0.9, 0.95)
    momentum = value_of(config, "optimizer.options.momentum") or betas[0]  # type: ignore[index]
    loss = FLOOR.get(name, 4.0) + 0.1 * math.log2(lr / BEST.get(name, 1e-2)) ** 2 + abs(momentum - 0.9)  # type: ignore[operator]
    return float(loss + 0.001 * (config.seed * len(name) % 7))


def write(config: TrainConfig, folder: Path, loss: float) -> Run:
    """Write a run as training leaves it, which falls from 5.5 to a loss in a straight line."""
    dataset = Dataset.open(config.data)
    about = {"data": {"fingerprint": dataset.fingerprint, "folder": str(config.data)}}
    run = Run.create(folder, config.to_dict(), about)
    end = "diverged" if math.isnan(loss) else "finished"
    steps, tokens = config.steps or 1, config.batch * config.model.context
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        for step in range(steps + 1):
            now = 5.5 if math.isnan(loss) else 5.5 + (loss - 5.5) * step / steps
            metrics.write({"kind": "validation", "step": step, "tokens": step * tokens, "loss": now})
            if step:
                seconds = 0.5 * step
                row = {"loss": now, "tokens": step * tokens, "seconds": seconds, "tokens_per_second": 100.0}
                metrics.write({"kind": "train", "step": step, **row})
            if config.target is not None and now <= config.target:
                break
        metrics.write({"kind": "event", "step": step, "what": end, "message": ""})
    return run


class Fake:
    """In place of training; notes what it trains, and can be made to stop after some runs."""

    def __init__(self) -> None:
        self.trained: list[Path] = []
        self.loss: Loss = valley
        self.stop_after: float = math.inf

    def train(self, config: TrainConfig, folder: Path, **_: Any) -> Run:
        if len(self.trained) >= self.stop_after:
            raise KeyboardInterrupt
        self.trained.append(folder)
        return write(config, folder, self.loss(config))
