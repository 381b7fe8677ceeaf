"""An arena with a formula in place of training: the nearer the rate to the best, the lower the loss."""

import math
from pathlib import Path

from merit_lab.data import Dataset
from merit_lab.runs import MetricsWriter, Run
from merit_lab.study.fields import value_of
from merit_lab.train import TrainConfig

BEST = {"adamw": 4e-3, "muon": 1.6e-2, "muon-merit": 8e-2, "torch:Muon": 2e-3, "torch:SGD": 2e-3}
FLOOR = {"adamw": 3.0, "muon": 2.5, "muon-merit": 2.2, "torch:Muon": 2.4, "torch:SGD": 3.5}
CONTESTANTS = ("adamw", "muon", "muon-merit")
STEPS = 8
SMALL = ["--model.layers=1", "--model.width=16", "--model.heads=1", "--model.context=16"]


def arguments(data: Path, out: Path) -> list[str]:
    """The arguments of an arena, without its contestants."""
    return ["tiny", "--data", str(data), "--out", str(out), *SMALL, "--batch=4", f"--steps={STEPS}"]


def final_loss(config: TrainConfig) -> float:
    """Lowest at the best rate, twice that for the rest, and a momentum of 0.9; seeds differ slightly."""
    name, lr = config.optimizer.name, config.optimizer.lr
    loss = FLOOR[name] + 0.1 * math.log2(lr / BEST[name]) ** 2 + 0.001 * (config.seed * len(name) % 7)
    momentum = value_of(config, "optimizer.options.momentum")
    loss += 0.0 if momentum is None else 0.1 * abs(momentum - 0.9)
    rest = config.optimizer.rest_lr or config.optimizer.options_by_name().get("rest_lr")
    return loss if rest is None else loss + 0.02 * math.log2(rest / (2 * lr)) ** 2


def train(
    config: TrainConfig, folder: Path, *, resume: bool, bars: object = (), target: object = None
) -> None:
    """Write a run as training would leave it."""
    assert not resume
    assert target is None
    dataset = Dataset.open(config.data)
    environment = {
        "data": {"fingerprint": dataset.fingerprint},
        "device": {"name": "cpu", "type": "cpu"},
        "started": "2026-01-01T00:00:00+00:00",
    }
    run = Run.create(folder, config.to_dict(), environment)
    diverges = config.optimizer.lr > 8 * BEST[config.optimizer.name]
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        end = "diverged" if diverges else "finished"
        for step in range(0, config.steps + 1, 2):
            loss = 5.5 + (final_loss(config) - 5.5) * step / config.steps
            metrics.write({"kind": "validation", "step": step, "tokens": 64 * step, "loss": loss})
            entropy = 3.0 if config.optimizer.name != "adamw" else 3.0 - 2.8 * step / config.steps
            metrics.write({"kind": "attention", "step": step, "max_logits": [[9.0]], "entropy": [[entropy]]})
            if loss > dict(bars).get(step, math.inf):
                end = "abandoned"
                break
            if step:
                row = {"loss": loss, "tokens": 64 * step, "seconds": 0.5 * step, "memory_gib": 1.5}
                metrics.write({"kind": "train", "step": step, **row})
        metrics.write({"kind": "event", "step": step, "what": end, "message": "the end"})
