"""Run directories as training writes them, with numbers from formulas."""

import math
from pathlib import Path
from typing import Any

from merit_lab.runs import MetricsWriter, Run

HEADS = 2
HOSTILE = (
    "bell\x07",
    "noncharacter\uffff",
    "line\nbreak",
    "separator\u2028",
    'quote"\\"',
    "</svg></style><script>document.title='taken'</script>",
    "a|b",
    "x" * 10_000,
)
"""Names of series and runs that ended programs, or changed pages, which showed them as they are."""
ABOVE = {"lamb-uncorrected": 0.25, "adamw": 0.5}  # other optimizers' losses, in the end


def write_run(
    folder: Path,
    name: str = "merit",
    *,
    seed: int = 0,
    steps: int = 8,
    end: str | None = "finished",
    diverges_at: int | None = None,
    **settings: Any,
) -> Run:
    """Write a run: validation and attention every second step, training and updates at every step.

    ``end`` None leaves it as a process that is killed at the last step would.
    """
    config = {
        "data": "/home/somebody/enwik8",
        "seed": seed,
        "steps": steps,
        "batch": 1,
        "model": {"preset": "tiny", "context": 64},
        "optimizer": {"name": name, "lr": 0.01, "options": ["momentum=0.9"], "betas": [0.9, 0.95]},
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
    last, end = (steps, end) if diverges_at is None else (diverges_at, "diverged")
    with MetricsWriter(run.metrics_path) as metrics:

        def write(kind: str, step: int, **values: Any) -> None:
            metrics.write({"kind": kind, "step": step, **values})

        write("event", 0, what="started", message="")
        for step in range(last + 1):
            loss = 3 + seed / 7 + ABOVE.get(name, 0.0) * step / steps + math.exp(-step / 3)
            loss = math.nan if step == diverges_at else loss
            if step:
                logged = {"loss": loss / 3, "lr": 0.01 / step, "grad_norm": 1 / step, "mfu": None}
                write("train", step, **logged, tokens=64 * step, seconds=step / 3)
                parts = {"w": {"clipped": step / 30, "bounded": 0.0, "relative_change": 0.1}}
                write("update", step, parameters=parts)
            if step % 2 == 0:
                write("validation", step, loss=loss, loss_error=0.01, tokens=64 * step)
                logits = [[step + 1 / 3, step + head] for head in range(HEADS)]
                write("attention", step, max_logits=logits, entropy=logits)
        if end:
            write("event", last, what=end, message=f"it {end}")
    return run


def write_three_seeds(folder: Path) -> Path:
    """Three seeds of each of three optimizers; one AdamW run diverged and one LAMB run was killed."""
    for seed in range(3):
        write_run(folder / f"adamw-{seed}", "adamw", seed=seed, diverges_at=6 if seed == 2 else None)
        write_run(
            folder / f"lamb-{seed}", "lamb-uncorrected", seed=seed, end=None if seed == 1 else "finished"
        )
        write_run(folder / f"merit-{seed}", seed=seed)
    return folder
