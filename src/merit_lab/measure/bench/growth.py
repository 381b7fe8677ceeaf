"""How the cost of a step grows with the size of the model and with its number of tensors.

    merit bench growth [--device cuda] [--out results.json]

The first uses weights of 1024 x 1024; the second a fixed total, divided into smaller and smaller squares.
MERIT and torch's AdamW are timed in one process: on a GPU both fused, with device and host times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from dataclasses import asdict
from typing import Any

import torch

from merit_lab.measure.bench.contestants import BenchContestant
from merit_lab.measure.bench.options import add_options
from merit_lab.measure.bench.shapes import Parameters, Shape, WeightSpec, num_elements
from merit_lab.measure.bench.step import environment, measure
from merit_optim import MERIT

SIDE = 1024
MILLIONS = (1, 4, 16, 64, 256, 1024, 4096, 7168)  # on a CPU up to 64
TENSORS = (1, 4, 16, 64, 256, 1024, 4096)
FIXED_TOTAL = 2**26  # on a CPU a quarter of it


def by_size(device: torch.device) -> dict[str, list[Shape]]:
    """1M to 7B parameters in weights of the same size."""
    most = MILLIONS[-1] if device.type == "cuda" else 64
    return {f"{n}M parameters": [(SIDE, SIDE)] * n for n in MILLIONS if n <= most}


def by_number(device: torch.device) -> dict[str, list[Shape]]:
    """The same number of parameters in one tensor up to thousands."""
    total = FIXED_TOTAL if device.type == "cuda" else FIXED_TOTAL // 4
    return {f"{n} tensors": [(math.isqrt(total // n),) * 2] * n for n in TENSORS}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="merit bench growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, seconds=0.5, unit="measurement")
    args = parser.parse_args(argv)
    device: torch.device = args.device
    fused = device.type == "cuda"
    contestants = [
        BenchContestant("torch AdamW", lambda p: torch.optim.AdamW(p.all, fused=fused, foreach=not fused)),
        BenchContestant("MERIT", lambda p: MERIT(p.all)),
    ]
    record: dict[str, Any] = {"environment": environment(device), "results": []}
    print(f"{'':20} {'AdamW':>10} {'MERIT':>10} {'ratio':>6} {'bytes/s':>10}    host: AdamW, MERIT, ms")
    for name, shapes in (by_size(device) | by_number(device)).items():
        params = Parameters.of([WeightSpec(shape, "hidden") for shape in shapes], device)
        adamw, merit = (measure(contestant, params, name, args.seconds) for contestant in contestants)
        for result in (adamw, merit):
            sizes = {"num_elements": num_elements(shapes), "num_tensors": len(shapes)}
            record["results"].append(asdict(result) | sizes)
        speed = 40 * num_elements(shapes) / merit.median_ms / 1e9
        host = "".join(f"{r.host_ms:9.3f}" for r in (adamw, merit) if r.host_ms is not None)
        ratio = merit.median_ms / adamw.median_ms
        print(
            f"{name:20} {adamw.median_ms:10.3f} {merit.median_ms:10.3f} {ratio:6.2f} {speed:7.2f} TB/s {host}"
        )
        if args.output:
            args.output.write_text(json.dumps(record, indent=1) + "\n")
        del params
        gc.collect()
