"""Run directories as training writes them, with numbers from formulas."""

import math
from pathlib import Path
from typing import Any

from merit_lab.runs import MetricsWriter, Run

HEADS = 2


def write_run(
    folder: Path, *, seed: int = 0, steps: int = 8, end: str | None = "finished", **settings: Any
) -> Run:
    """Write a run: validation and attention every second step, training and updates at every step."""
    config = {
        "data": "/home/somebody/enwik8",
        "seed": seed,
        "steps": steps,
        "optimizer": {"name": "merit", "lr": 0.01, "options": ["rest_lr=0.002"], "betas": [0.9, 0.95]},
        **settings,
    }
    environment = {
        "versions": {"torch": "2.13.0"},
        "device": {"name": "cpu"},
        "data": {"folder": "/home/somebody/enwik8", "fingerprint": "f", "bytes_per_token": 4.0},
        "host": "a-private-name",
        "command": ["merit", "train"],
        "folder": "/home/somebody",
        "started": f"2026-01-0{seed + 1}",
    }
    run = Run.create(folder, config, environment)
    with MetricsWriter(run.metrics_path) as metrics:

        def write(kind: str, step: int, **values: Any) -> None:
            metrics.write({"kind": kind, "step": step, **values})

        write("event", 0, what="started", message="")
        for step in range(steps + 1):
            loss = 3 + seed / 7 + math.exp(-step / 3)
            if step:
                write(
                    "train", step, loss=loss / 3, lr=0.01 / step, tokens=64 * step, seconds=step / 3, mfu=None
                )
                parts = {"w": {"clipped": step / 30, "bounded": 0.0, "relative_change": 0.1}}
                write("update", step, parameters=parts)
            if step % 2 == 0:
                write("validation", step, loss=loss, tokens=64 * step)
                logits = [[step + 1 / 3, step + head] for head in range(HEADS)]
                write("attention", step, max_logits=logits, entropy=logits)
        if end:
            write("event", steps, what=end, message=f"it {end}")
    return run
