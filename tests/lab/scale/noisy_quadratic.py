"""Training on a quadratic whose gradient noise, and so whose critical batch, is known.

The loss is |w|^2 / 2. The gradient of one example is w plus noise of covariance NOISE_SCALE |w|^2 I / d, so
that the noise scale tr(H S) / (g^T H g) of McCandlish et al. (2018, section 2.2) is NOISE_SCALE throughout.
With the step size a = eta / (1 + NOISE_SCALE / B), eta times the best one for a batch of B, a step
multiplies the expected loss by

    (1 - a)^2 + a^2 NOISE_SCALE / B = 1 - eta (2 - eta) / (1 + NOISE_SCALE / B),

so for small eta the steps to a loss are S_min (1 + NOISE_SCALE / B), S_min = log(FIRST / target) / (2 eta).
"""

import math
from pathlib import Path

import numpy as np

from merit_lab.data import Dataset
from merit_lab.runs import MetricsWriter, Run
from merit_lab.train import TrainConfig

NOISE_SCALE = 32.0
DIMENSIONS = 200
FIRST = 4.0


def step_size(batch: int, eta: float) -> float:
    """The learning rate for a batch."""
    return eta / (1 + NOISE_SCALE / batch)


def least_steps(target: float, eta: float) -> float:
    """S_min."""
    return math.log(FIRST / target) / (2 * eta)


def train(
    config: TrainConfig, folder: Path, *, resume: bool, target: float | None = None, **_: object
) -> None:
    """A replacement for ``train``: gradients are means over examples with independent noise."""
    assert not resume
    assert config.steps is not None
    assert config.optimizer.lr is not None
    random = np.random.default_rng([config.seed, config.batch])
    weights = np.full(DIMENSIONS, np.sqrt(2 * FIRST / DIMENSIONS))
    dataset = Dataset.open(config.data)
    run = Run.create(folder, config.to_dict(), {"data": {"fingerprint": dataset.fingerprint}})
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        for step in range(config.steps + 1):
            if step % config.measure.validation_every == 0 or step == config.steps:
                loss = float(weights @ weights / 2)
                metrics.write({"kind": "validation", "step": step, "tokens": step, "loss": loss})
                if target is not None and loss <= target:
                    break
            noise = random.standard_normal((config.batch, DIMENSIONS)).mean(0)
            noise *= np.sqrt(NOISE_SCALE / DIMENSIONS) * np.linalg.norm(weights)
            weights = weights - config.optimizer.lr * (weights + noise)
        metrics.write({"kind": "event", "step": step, "what": "finished", "message": ""})
