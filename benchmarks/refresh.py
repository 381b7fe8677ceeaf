"""What the steps of SOAPMERIT take when bases are improved in turns, and when all are in the same step.

    python benchmarks/refresh.py [--models small medium large] [--steps 32] [--precision highest high]

Milliseconds on a CUDA device between events around each step, of the hidden matrices of a GPT-2 alone. The
first step, which finds the bases, is shown by itself; of the others the median and the longest.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from merit_optim import SOAPMERIT

# Width and depth.
MODELS = {"small": (768, 12), "medium": (1024, 24), "large": (1280, 36)}


def step_times(width: int, depth: int, num_steps: int, refresh_phase: int | None) -> list[float]:
    """Milliseconds of each step; the queue is empty when it begins."""
    torch.manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * depth
    params = [nn.Parameter(0.02 * torch.randn(shape, device="cuda")) for shape in shapes]
    optimizer = SOAPMERIT([{"params": params, "direction": "soap"}], refresh_phase=refresh_phase)
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    times = []
    for _ in range(num_steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["small"], choices=MODELS)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--precision", nargs="+", default=["highest"], choices=["highest", "high"])
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    step_times(128, 2, 3, None)  # loads the libraries
    for precision in args.precision:
        torch.set_float32_matmul_precision(precision)
        for name in args.models:
            for refresh_phase in (None, 0):
                first, _, *others = step_times(*MODELS[name], args.steps, refresh_phase)
                others.sort()
                median, longest = others[len(others) // 2], others[-1]
                print(
                    f"{precision:8} {name:7} refresh_phase={refresh_phase!s:5} first {first:7.1f} "
                    f"median {median:7.1f} longest {longest:7.1f} {longest / median:6.2f} times the median",
                    flush=True,
                )


if __name__ == "__main__":
    main()
