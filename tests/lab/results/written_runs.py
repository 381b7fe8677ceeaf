"""Run directories as training would write them, with numbers from formulas."""

import math
import random
from pathlib import Path
from typing import Any

from merit_lab.runs import MetricsWriter, Run

BATCH = 256
CONTEXT = 64
# Arbitrary final loss and growth of the logits.
SHAPES = {"adamw": (2.6, 1.6), "lamb": (2.35, 0.9), "merit": (2.3, 0.5)}


def write_run(
    parent: Path,
    optimizer: str,
    *,
    lr: float = 1e-2,
    seed: int = 0,
    num_steps: int = 100,
    every: int = 5,
    num_layers: int = 4,
    end: str | None = "finished",
    diverges_at: int | None = None,
    loss_offset: float = 0.0,
    trained_on: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write a run and return its folder; ``end`` None leaves it as a process that is killed half-way would.

    ``trained_on`` is the data part of the recorded environment.
    """
    folder = parent / f"{optimizer}-lr{lr:g}-seed{seed}"
    config = {
        "seed": seed,
        "steps": num_steps,
        "batch": BATCH,
        "model": {"preset": "tiny", "layers": num_layers, "context": CONTEXT},
        "optimizer": {"name": optimizer, "lr": lr, "betas": [0.9, 0.95]},
        **settings,
    }
    environment: dict[str, Any] = {
        "versions": {"torch": "2.13.0"},
        "device": {"name": "cpu"},
        "host": "a-private-name",
    }
    if trained_on is not None:
        environment["data"] = trained_on
    run = Run.create(folder, config, environment)
    noise = random.Random(f"{optimizer}{lr}{seed}")
    floor, growth = SHAPES[optimizer.rpartition(":")[2].lower()]
    last = diverges_at or (num_steps if end else num_steps // 2)
    with MetricsWriter(run.metrics_path) as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "started", "message": ""})
        for step in range(0, last + 1, every):
            tokens = step * BATCH * CONTEXT
            share = step / num_steps
            loss = floor + 3.2 * math.exp(-6 * share) + noise.gauss(0, 0.01) + loss_offset
            if step == diverges_at:
                loss = math.nan
            if step:
                metrics.write(
                    {
                        "kind": "train",
                        "step": step,
                        "loss": loss + noise.gauss(0, 0.03),
                        "lr": lr * min(share / 0.02, 0.55 + 0.45 * math.cos(math.pi * share)),
                        "grad_norm": 0.3 + 2 * math.exp(-9 * share) + abs(noise.gauss(0, 0.03)),
                        "weight_norm": 20 + 45 * math.sqrt(share),
                        "tokens": tokens,
                        "seconds": step * 0.3,
                        "tokens_per_second": BATCH * CONTEXT / 0.3 + noise.gauss(0, 800),
                        "mfu": None,
                        "optimizer_share": 0.1,
                        "memory_gib": None,
                    }
                )
            if step % (2 * every) == 0:
                validation = {"kind": "validation", "step": step, "tokens": tokens, "loss": loss + 0.02}
                metrics.write({**validation, "loss_error": 0.01})
                logits = [
                    [
                        0.5 + growth * 12 * share ** (0.3 + 0.1 * layer) * (1 + 0.4 * head) + noise.random()
                        for head in range(2)
                    ]
                    for layer in range(num_layers)
                ]
                entropy = [[3 - growth * share - 0.1 * head for head in range(2)] for _ in range(num_layers)]
                metrics.write({"kind": "attention", "step": step, "max_logits": logits, "entropy": entropy})
            if step and step % (2 * every) == 0 and optimizer != "adamw":
                statistics = {
                    "clipped": 0.02 * math.exp(-3 * share) if optimizer == "merit" else 0.0,
                    "bounded": 0.3 + 0.2 * share if optimizer == "merit" else 0.0,
                    "smallest_ratio": 0.1,
                    "largest_ratio": 2.0,
                    "relative_change": 0.01 * (1 - 0.8 * share),
                }
                names = ("embedding", "query", "key", "value")
                metrics.write(
                    {"kind": "update", "step": step, "parameters": dict.fromkeys(names, statistics)}
                )
        if diverges_at is not None:
            end = "diverged"
        if end is not None:
            message = f"the loss was nan at step {diverges_at}" if end == "diverged" else ""
            metrics.write({"kind": "event", "step": last, "what": end, "message": message})
    return folder


def write_three_seeds(folder: Path) -> Path:
    """Three seeds of each of three optimizers; one AdamW run diverged and one LAMB run was killed."""
    for seed in range(3):
        write_run(folder, "adamw", lr=1e-3, seed=seed, diverges_at=60 if seed == 2 else None)
        write_run(folder, "lamb", seed=seed, end=None if seed == 1 else "finished")
        write_run(folder, "merit", lr=9e-3, seed=seed)
    return folder
