"""Seconds a run of a study costs: many runs by `merit train --list`, start and compilation included.

    PYTHONPATH=src python benchmarks/pool.py [--runs 20] [--jobs 2] [--model nano-10m-bpe] [--data FOLDER]

The defaults are those of a plain loop that takes 17.5 s a run on an H200: 10M parameters, 800 steps of
128 x 512 tokens, two processes on one GPU. Without --data the tokens are random. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--model", default="nano-10m-bpe")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, help="default: found by trial on a GPU")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon-merit", "normuon", "merit"])
    parser.add_argument("--data", type=Path)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = a.data or random_tokens(folder / "data")
        lines = [
            {
                "name": str(number),
                "data": str(data),
                "model": a.model,
                "optimizer.name": a.optimizers[number % len(a.optimizers)],
                "optimizer.lr": 1e-3 * (1 + number / a.runs),
                "steps": a.steps,
                "batch": a.batch,
                "micro_batch": a.micro_batch,
                "seed": number,
                "checkpoint.keep": 0,
            }
            for number in range(a.runs)
        ]
        (folder / "list.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "merit_optim", "train", "--list", str(folder / "list.jsonl")]
        began = time.monotonic()
        subprocess.run([*command, "--out", str(folder / "runs"), "--jobs", str(a.jobs)], check=True)
        seconds = time.monotonic() - began
        steps = [
            json.loads(line)
            for path in (folder / "runs").glob("*/metrics.jsonl")
            for line in path.read_text().splitlines()
        ]
        inside = sum(line["seconds"] for line in steps if line["kind"] == "train" and line["step"] == a.steps)
    report = {"runs": a.runs, "jobs": a.jobs, "seconds": round(seconds, 1), "seconds_a_run": seconds / a.runs}
    print(json.dumps({**report, "in_steps_a_run": inside / a.runs / a.jobs}))


def random_tokens(folder: Path) -> Path:
    """Write tokens of a vocabulary that every preset has; what they say makes no difference to the speed."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, num in (("train", 26_000_000), ("val", 300_000)):
        generator.integers(256, size=num, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


if __name__ == "__main__":
    main()
