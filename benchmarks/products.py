"""Which tiles are fastest for the products of Newton-Schulz, beside cuBLAS.

    python benchmarks/products.py [--shapes 24x768x3072 ...] [--output FILE]

TFLOP/s with every product counted in full, also where symmetry saves half of it. ``all`` is the whole of
Newton-Schulz, its norms included, at the tiles that are set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tiles import milliseconds
from torch import Tensor

from merit_optim.optim.axes.directions import Muon
from merit_optim.optim.engines.fused import newton_schulz
from merit_optim.optim.engines.fused.newton_schulz import Iteration, Polar, ProductTile

SHAPES = [
    (12, 2304, 768),
    (12, 768, 768),
    (12, 768, 3072),
    (24, 1024, 1024),
    (24, 1024, 4096),
    (18, 5120, 1280),
    (2, 4096, 11008),
]
SYMMETRIC = [
    ProductTile(128, 128, 64, 4, 3),
    ProductTile(128, 128, 64, 4, 4),
    ProductTile(128, 128, 64, 8, 3),
]
PRODUCT = [
    ProductTile(128, 256, 64, 8, 4),
    ProductTile(128, 256, 64, 8, 3),
    ProductTile(256, 128, 64, 8, 4),
    ProductTile(128, 128, 64, 4, 3),
    ProductTile(128, 128, 64, 4, 4),
]
A, B, C = 3.4445, -4.7750, 2.0315


def parts_of(
    polar: Polar, x: Tensor, y: Tensor, gram: Tensor, polynomial: Tensor
) -> dict[str, Callable[[], object]]:
    """The three products of a pass."""
    return {
        "gram": partial(polar.gram, x, gram),
        "square": partial(polar.combine, gram, gram, polynomial, C, B),
        "product": partial(polar.apply, polynomial, x, y, A),
    }


def cublas(
    polar: Polar, x: Tensor, y: Tensor, gram: Tensor, polynomial: Tensor
) -> dict[str, Callable[[], object]]:
    """The same by torch's batched products."""
    wide = x.mT if polar.is_tall else x
    left, right = (x, polynomial) if polar.is_tall else (polynomial, x)
    return {
        "gram": partial(torch.bmm, wide, wide.mT, out=gram),
        "square": partial(torch.baddbmm, gram, gram, gram, beta=B, alpha=C, out=polynomial),
        "product": partial(torch.baddbmm, x, left, right, beta=A, out=y),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / milliseconds(partial(torch.mm, square, square), args.repeats) / 1e9
    print(f"a product of 8192 x 8192 matrices by cuBLAS: {rate:.0f} TFLOP/s", flush=True)
    results: list[dict[str, object]] = []

    def add(shape: str, what: str, tile: object, flops: int, run: Callable[[], object]) -> None:
        teraflops = flops / milliseconds(run, args.repeats) / 1e9
        results.append({"shape": shape, "what": what, "tile": tile, "teraflops": round(teraflops, 1)})
        print(f"{shape:14} {what:8} {tile!s:24} {teraflops:5.0f}  {teraflops / rate:.2f}", flush=True)
        if args.output:
            args.output.write_text(json.dumps({"cublas_8192": rate, "results": results}, indent=1))

    for shape in args.shapes:
        num, rows, columns = map(int, shape.split("x"))
        iteration = Iteration.of(Muon(), rows, columns)
        polar = Polar(num, iteration)
        x = torch.randn(num, rows, columns, device="cuda").div_((rows * columns) ** 0.5).bfloat16()
        buffers = x, torch.empty_like(x), *x.new_empty(2, num, polar.m, polar.m).unbind()
        for run in parts_of(polar, *buffers).values():  # so that no operand is uninitialised
            run()
        flops = {"gram": 2 * num * polar.m**2 * polar.k, "square": 2 * num * polar.m**3}
        flops["product"] = flops["gram"]
        for what, run in cublas(polar, *buffers).items():
            add(shape, what, "cuBLAS", flops[what], run)
        chosen = newton_schulz.SYMMETRIC_TILE, newton_schulz.PRODUCT_TILE
        for tile in SYMMETRIC:
            newton_schulz.SYMMETRIC_TILE = tile
            parts = parts_of(Polar(num, iteration), *buffers)
            for what in ("gram", "square"):
                add(shape, what, tuple(tile), flops[what], parts[what])
        for tile in PRODUCT:
            newton_schulz.PRODUCT_TILE = tile
            add(
                shape,
                "product",
                tuple(tile),
                flops["product"],
                parts_of(Polar(num, iteration), *buffers)["product"],
            )
        newton_schulz.SYMMETRIC_TILE, newton_schulz.PRODUCT_TILE = chosen
        polar = Polar(num, iteration)
        add(shape, "all", "as set", num * Muon().num_operations(rows, columns), partial(polar, x.clone()))


if __name__ == "__main__":
    main()
