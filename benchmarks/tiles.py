"""Which tile is fastest: times the two kernels of the fused engine for many tile shapes.

    python benchmarks/tiles.py [--models gpt2-small gpt2-medium] [--output FILE]

Prints the achieved bandwidth: the moments phase moves 24 bytes a parameter, the apply phase 16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from shapes import MODELS, make_parameters, num_elements

from merit_optim import MERIT
from merit_optim.optim.engines.fused import FusedEngine, Shared
from merit_optim.optim.engines.tables import Tile
from merit_optim.optim.engines.work import Control


def milliseconds(run, repeats: int) -> float:
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


def candidates() -> list[Tile]:
    """Blocks with 16 or 32 elements a thread, from square to one row high."""
    blocks = [(32, 128, 4), (32, 128, 8), (16, 128, 4), (64, 128, 8), (64, 64, 4), (32, 64, 4)]
    blocks += [(16, 256, 4), (16, 256, 8), (8, 256, 4), (8, 512, 4), (8, 512, 8), (4, 1024, 4), (4, 1024, 8)]
    return [
        Tile(rows, columns, steps, warps)
        for rows, columns, warps in blocks
        for steps in (1, 2, 4, 8)
        if 32 <= rows * steps <= 256
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2-small"], choices=MODELS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=400, help="stop after this long")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, began, results = torch.device("cuda"), time.monotonic(), []
    for model in args.models:
        params = make_parameters(MODELS[model], device)
        total = num_elements(MODELS[model])
        optimizer = MERIT(params)
        works = optimizer._gather()
        for tile in candidates():
            if time.monotonic() - began > args.seconds:
                break
            engine = FusedEngine(device)
            engine.moments_tile = engine.apply_tile = tile
            try:
                engine.step(works, Control(), None)
                shared = Shared(engine._sizes, engine._hyper, None)
                (launch,) = engine._launches
                first = milliseconds(partial(launch.run_moments, shared, Control()), args.repeats)
                last = milliseconds(partial(launch.run_apply, shared, Control(), None), args.repeats)
            except Exception as error:
                print(model, tuple(tile), type(error).__name__, str(error)[:80], file=sys.stderr, flush=True)
                continue
            row = {"model": model, "tile": tuple(tile), "moments_ms": first, "apply_ms": last}
            row |= {"moments_tbs": 24 * total / first / 1e9, "apply_tbs": 16 * total / last / 1e9}
            results.append(row)
            if args.output:
                args.output.write_text(json.dumps(results, indent=1))
    for phase in ("moments", "apply"):
        for model in args.models:
            best = sorted((r for r in results if r["model"] == model), key=lambda r: r[f"{phase}_ms"])
            print(f"\n{model}, {phase}: rows, columns, steps, warps")
            for r in best[:12]:
                print(f"  {r['tile']!s:22} {r[f'{phase}_ms']:.3f} ms  {r[f'{phase}_tbs']:.2f} TB/s")
            print(f"  ... worst {best[-1]['tile']} {best[-1][f'{phase}_ms']:.3f} ms; {len(best)} tried")


if __name__ == "__main__":
    main()
