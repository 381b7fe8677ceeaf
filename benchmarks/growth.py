"""How the cost of a step grows: `python benchmarks/growth.py [--device cuda] [--out growth.json]`.

With the size of the model, in weights of 1024 x 1024, and with its number of tensors, a fixed total divided
into smaller and smaller squares. MERIT and torch's AdamW are timed, on a GPU both fused, with device and host
times.
"""

import argparse
import gc
import json
import math
from dataclasses import asdict
from pathlib import Path

import torch

from merit_lab.measure.bench.command import environment, measure
from merit_lab.measure.bench.contestants import BenchContestant
from merit_lab.measure.bench.model import Parameters, WeightSpec
from merit_optim import MERIT

MILLIONS = (1, 4, 16, 64, 256, 1024, 4096, 7168)  # on a CPU up to 64
TENSORS = (1, 4, 16, 64, 256, 1024, 4096)
FIXED_TOTAL = 2**26  # on a CPU a quarter of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, on_gpu = torch.device(args.device), args.device.startswith("cuda")
    contestants = [
        BenchContestant("torch AdamW", lambda p: torch.optim.AdamW(p.all, fused=on_gpu, foreach=not on_gpu)),
        BenchContestant("MERIT", lambda p: MERIT(p.all)),
    ]
    most, total = (MILLIONS[-1], FIXED_TOTAL) if on_gpu else (64, FIXED_TOTAL // 4)
    models = {f"{n}M parameters": [(1024, 1024)] * n for n in MILLIONS if n <= most}
    models |= {f"{n} tensors": [(math.isqrt(total // n),) * 2] * n for n in TENSORS}
    record = {"environment": environment(device), "results": []}
    print(f"{'':20} {'AdamW':>10} {'MERIT':>10} {'ratio':>6} {'bytes/s':>10}    host: AdamW, MERIT, ms")
    for name, shapes in models.items():
        weights = [WeightSpec(shape, "hidden") for shape in shapes]
        num_elements = sum(weight.num_elements for weight in weights)
        params = Parameters.of(weights, device)
        adamw, merit = (measure(contestant, params, name, args.seconds) for contestant in contestants)
        sizes = {"num_elements": num_elements, "num_tensors": len(shapes)}
        record["results"] += [asdict(adamw) | sizes, asdict(merit) | sizes]
        speed = 40 * num_elements / merit.median_ms / 1e9
        host = "".join(f"{r.host_ms:9.3f}" for r in (adamw, merit) if r.host_ms is not None)
        times = f"{adamw.median_ms:10.3f} {merit.median_ms:10.3f} {merit.median_ms / adamw.median_ms:6.2f}"
        print(f"{name:20} {times} {speed:7.2f} TB/s {host}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
        del params
        gc.collect()


if __name__ == "__main__":
    main()
