"""Which tile and which lead are fastest: times the fused engine's kernel for many of them.

    python benchmarks/tiles.py [--models gpt2-small gpt2-medium] [--output FILE]

Beside each other in one run: torch's fused AdamW, and MERIT's one launch for each candidate. The floor
is 28 bytes a parameter if the second phase finds everything in the cache, 40 if it finds nothing.
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
from shapes import MODELS, make_parameters, num_elements

from merit_optim import MERIT
from merit_optim.optim.engines.fused import FusedEngine
from merit_optim.optim.engines.tables import Tile
from merit_optim.optim.engines.work import Control

# Rows, columns, warps, most registers a thread may have.
BLOCKS = [
    (32, 64, 4, None),
    (32, 64, 4, 96),
    (32, 64, 4, 80),
    (32, 64, 8, None),
    (32, 64, 8, 64),
    (16, 64, 4, None),
    (16, 64, 4, 64),
    (64, 64, 4, None),
    (64, 64, 8, None),
    (64, 64, 8, 80),
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
    parser.add_argument("--models", nargs="+", default=["gpt2-small"], choices=MODELS)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--leads", nargs="+", type=int, default=[256, 1024, 2048])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=400, help="stop after this long")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, began, results = torch.device("cuda"), time.monotonic(), []
    for model in args.models:
        params = make_parameters(MODELS[model], device)
        total = num_elements(MODELS[model])
        adamw = milliseconds(torch.optim.AdamW(params, fused=True).step, args.repeats)
        print(f"{model}: torch AdamW fused {adamw:.3f} ms, {28 * total / adamw / 1e9:.2f} TB/s", flush=True)
        works = MERIT(params)._gather()
        for (rows, columns, warps, registers), steps, lead in itertools.product(
            BLOCKS, args.steps, args.leads
        ):
            if time.monotonic() - began > args.seconds:
                break
            engine = FusedEngine(device)
            engine.tile, engine.lead = Tile(rows, columns, steps, warps, registers), lead
            try:
                ms = milliseconds(partial(engine.step, works, Control(), None), args.repeats)
            except Exception as error:
                print(model, engine.tile, type(error).__name__, str(error)[:80], file=sys.stderr, flush=True)
                continue
            results.append(
                {"model": model, "tile": engine.tile, "lead": engine.lead, "ms": ms, "adamw_ms": adamw}
            )
            if args.output:
                args.output.write_text(json.dumps(results, indent=1))
        best = sorted((r for r in results if r["model"] == model), key=lambda r: r["ms"])
        print(f"{model}, {len(best)} tried: tile, lead, time, against AdamW, bytes each at 4.2 TB/s")
        for r in (*best[:12], *best[-1:]):
            size = r["ms"] * 4.2e9 / total
            print(
                f"  {tuple(r['tile'])!s:18} {r['lead']:5} {r['ms']:.3f} ms {r['ms'] / adamw:.3f} {size:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
