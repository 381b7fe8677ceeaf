"""Which tiles are fastest: times the two kernels of the fused engine for many of them.

    python benchmarks/tiles.py [--models gpt2-small gpt2-medium] [--output FILE]

The moments phase moves 24 bytes a parameter, the apply phase 16. Torch's fused AdamW, which moves 28, is
measured beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from merit_lab.measure.bench.model import WEIGHTS, Parameters
from merit_optim import MERIT
from merit_optim.optim.engines.fused.engine import FusedEngine
from merit_optim.optim.engines.fused.tables import Tile
from merit_optim.optim.engines.work import Control

# Rows, columns, warps, most registers a thread may have.
BLOCKS = [
    (8, 64, 2, None),
    (8, 64, 1, None),
    (16, 64, 2, None),
    (16, 32, 2, None),
    (16, 64, 4, None),
    (32, 64, 4, None),
    (32, 64, 4, 96),
    (4, 128, 2, None),
    (8, 128, 4, None),
    (32, 32, 4, None),
]


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of a call on the device."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2-small"], choices=WEIGHTS)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=400, help="stop after this long")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, began, results = torch.device("cuda"), time.monotonic(), []
    for model in args.models:
        params = Parameters.of(WEIGHTS[model], device).all
        total = sum(param.numel() for param in params)
        adamw = milliseconds(torch.optim.AdamW(params, fused=True).step, args.repeats)
        print(f"{model}: torch AdamW fused {adamw:.3f} ms, {28 * total / adamw / 1e9:.2f} TB/s", flush=True)
        works = MERIT(params)._gather()
        for (rows, columns, warps, registers), steps in itertools.product(BLOCKS, args.steps):
            if time.monotonic() - began > args.seconds:
                break
            engine = FusedEngine(device)
            engine.moments_tile = engine.apply_tile = Tile(rows, columns, steps, warps, registers)
            try:
                (part,), _ = engine.parts_of(works, Control())
                part.advance()
                part.apply(None)
                (launch,), shared = engine._launches, engine._shared
                moments = milliseconds(partial(launch.run_moments, shared, None, Control()), args.repeats)
                apply = milliseconds(partial(launch.run_apply, shared, None, Control(), None), args.repeats)
            except Exception as error:
                print(model, engine.apply_tile, type(error).__name__, str(error)[:80], file=sys.stderr)
                continue
            tile = tuple(engine.apply_tile)
            results.append({"model": model, "tile": tile, "moments": moments, "apply": apply, "adamw": adamw})
            if args.output:
                args.output.write_text(json.dumps(results, indent=1))
        for phase, size in (("moments", 24), ("apply", 16)):
            best = sorted((r for r in results if r["model"] == model), key=lambda r: r[phase])
            print(f"{model}, {phase}, {len(best)} tried: rows, columns, steps, warps, registers")
            for r in (*best[:8], best[-1]):
                print(
                    f"  {r['tile']!s:24} {r[phase]:.3f} ms {size * total / r[phase] / 1e9:.2f} TB/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
