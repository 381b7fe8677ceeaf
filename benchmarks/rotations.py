"""Where a fast SOAP would spend its time: products with the bases, and ways to keep the bases orthogonal.

    python benchmarks/rotations.py [products] [kernels] [bases]   milliseconds on a CUDA device, lines of JSON
    TRITON_INTERPRET=1 python benchmarks/rotations.py kernels     whether the kernels are right, on a CPU
    python benchmarks/rotations.py drift                          how well bases follow, on a CPU

products   cuBLAS, all matrices of a shape in a batch, in float32, TF32 and bfloat16
kernels    the same by `rotation_kernels.py`, in several tiles
bases      Q of L Q by Householder QR; by Cholesky QR of its normalised columns; by rotation: to first order
           that of A = Q' L Q is I + X with X skew, X_ij = A_ij / A_jj below the diagonal, whose polar factor
           Newton-Schulz forms, so with matrix products alone
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Matrices, rows, columns of GPT-2 small and medium, with query, key and value as three.
SHAPES = {
    "small, square": (48, 768, 768),
    "small, up": (12, 3072, 768),
    "medium, square": (96, 1024, 1024),
    "medium, up": (24, 4096, 1024),
}
SIDES = ((10, 768), (3, 3072), (1, 3072), (10, 1024), (3, 4096))
TILES = ((128, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 256, 32, 8, 3), (64, 128, 32, 4, 4))
G, M, V, L, R, QL, QR = range(7)
STEPS = ("into rows", "into columns", "out of rows", "out of columns", "row average", "column average")


def show(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def milliseconds(run: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(2 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times[2:]), 3)


def orthogonal(side: int) -> Tensor:
    return torch.linalg.qr(torch.randn(side, side, device=DEVICE))[0].contiguous()


def products() -> None:
    for name, (num, rows, columns) in SHAPES.items():
        for kind in ("float32", "tf32", "bf16"):
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            dtype = torch.bfloat16 if kind == "bf16" else torch.float32
            g = torch.randn(num, rows, columns, device=DEVICE, dtype=dtype)
            ql, qr = (orthogonal(side).to(dtype).repeat(num, 1, 1) for side in (rows, columns))
            flops = 6 * 2 * num * (rows * rows * columns + rows * columns * columns) / 2
            taken = milliseconds(
                lambda g=g, ql=ql, qr=qr: (ql.mT @ g @ qr, ql @ g @ qr.mT, g @ g.mT, g.mT @ g)
            )
            show(what="products", shape=name, kind=kind, ms=taken, tflops=round(flops / taken / 1e9))


class Batch:
    """Matrices of one shape with SOAP's state, found by address."""

    def __init__(self, num: int, rows: int, columns: int, tile: tuple[int, ...], precision: str) -> None:
        self.num, self.rows, self.columns, self.tile, self.precision = num, rows, columns, tile, precision
        like = {"device": DEVICE}
        self.tensors = [
            [
                torch.randn(rows, columns, **like),
                0.1 * torch.randn(rows, columns, **like),
                torch.rand(rows, columns, **like),
                torch.eye(rows, **like),
                torch.eye(columns, **like),
                orthogonal(rows),
                orthogonal(columns),
            ]
            for _ in range(num)
        ]
        self.addresses = torch.tensor([[x.data_ptr() for x in one] for one in self.tensors]).to(DEVICE)
        self.one, self.two = (torch.empty(num, rows, columns, **like) for _ in range(2))

    def run(self, step: str) -> None:
        """One of the six products of a step."""
        r, c, one, two = self.rows, self.columns, self.one, self.two
        places, sizes, buffers, how = {
            "into rows": ((QL, G, None), (r, c, r), (one, one, one), {"LEFT_T": True}),
            "into columns": ((None, QR, None), (r, c, c), (one, one, two), {"THEN": "adam"}),
            "out of rows": ((QL, None, None), (r, c, r), (one, two, one), {}),
            "out of columns": ((None, QR, None), (r, c, c), (one, one, two), {"RIGHT_T": True}),
            "row average": ((G, G, L), (r, r, c), (one,) * 3, {"RIGHT_T": True, "THEN": "average"}),
            "column average": ((G, G, R), (c, c, r), (one,) * 3, {"LEFT_T": True, "THEN": "average"}),
        }[step]
        rows, columns, inner, warps, stages = self.tile
        if symmetric := "average" in step:
            rows = columns = min(rows, columns)
        down, across = -(-sizes[0] // rows), -(-sizes[1] // columns)
        from rotation_kernels import product

        product[(self.num * (down * (down + 1) // 2 if symmetric else down * across),)](
            self.addresses,
            *buffers,
            *sizes,
            *(0.95, 0.95, 1e-8),
            NUM_ADDRESSES=7,
            **dict(zip(("LEFT", "RIGHT", "OUT"), places, strict=True)),
            **{"M": M, "V": V, "LEFT_T": False, "RIGHT_T": False, "THEN": None, **how},
            SYMMETRIC=symmetric,
            EVEN=not (sizes[0] % rows or sizes[1] % columns or sizes[2] % inner),
            PRECISION=self.precision,
            BLOCK_R=rows,
            BLOCK_C=columns,
            BLOCK_K=inner,
            GROUP=8,
            num_warps=warps,
            num_stages=stages,
        )

    def error(self) -> float:
        """The largest relative error of a step against float64."""
        before = [[x.double() for x in one] for one in self.tensors]
        for step in STEPS:
            self.run(step)
        worst = 0.0
        for (g, m, v, left, right, ql, qr), d, after in zip(before, self.two, self.tensors, strict=True):
            x = ql.T @ g @ qr
            m, v = 0.95 * m + 0.05 * x, 0.95 * v + 0.05 * x * x
            wanted = {M: m, V: v, L: 0.95 * left + 0.05 * g @ g.T, R: 0.95 * right + 0.05 * g.T @ g}
            pairs = [(after[which], value) for which, value in wanted.items()]
            pairs.append((d, ql @ (m / (v.sqrt() + 1e-8)) @ qr.T))
            worst = max(worst, *(((a.double() - b).norm() / b.norm()).item() for a, b in pairs))
        return worst


def kernels() -> None:
    for shape in ((2, 48, 32), (1, 32, 80)):
        show(what="error", shape=shape, error=Batch(*shape, (32, 16, 16, 4, 2), "ieee").error())
    if not ON_GPU:
        return
    for precision in ("ieee", "tf32", "tf32x3", "bf16"):
        show(what="error", precision=precision, error=Batch(2, 200, 136, TILES[0], precision).error())
    for name, shape in SHAPES.items():
        for precision in ("tf32", "bf16"):
            for tile in TILES:
                batch = Batch(*shape, tile, precision)
                taken = {step: milliseconds(lambda step=step, batch=batch: batch.run(step)) for step in STEPS}
                total = round(sum(taken.values()), 3)
                show(what="kernels", shape=name, precision=precision, tile=tile, ms=total, steps=taken)


def by_householder(average: Tensor, basis: Tensor) -> Tensor:
    return torch.linalg.qr(average @ basis)[0]


def by_cholesky(average: Tensor, basis: Tensor) -> Tensor:
    product = average @ basis
    gram = product.mT @ product
    scale = gram.diagonal(dim1=1, dim2=2).rsqrt()
    gram = gram * scale[:, :, None] * scale[:, None, :] + 1e-6 * torch.eye(gram.shape[-1], device=DEVICE)
    factor, _ = torch.linalg.cholesky_ex(gram, upper=True)
    return torch.linalg.solve_triangular(factor, product * scale[:, None, :], upper=True, left=False)


def by_rotation(average: Tensor, basis: Tensor, passes: int = 6) -> Tensor:
    turned = basis.mT @ (average @ basis)
    lower = torch.tril(turned / turned.diagonal(dim1=1, dim2=2)[:, None, :], -1).clamp(-1, 1)
    x = torch.eye(turned.shape[-1], device=DEVICE) + lower - lower.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True) * (x.shape[-1] ** 0.5 / 1.5)
    for _ in range(passes):
        x = 1.5 * x - 0.5 * x @ (x.mT @ x)
    return basis @ x


def bases() -> None:
    for num, side in SIDES:
        factor = torch.randn(num, side, 2 * side, device=DEVICE)
        average, basis = factor @ factor.mT / side, torch.stack([orthogonal(side) for _ in range(num)])
        for kind in ("float32", "tf32"):
            torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
            for way in (by_householder, by_cholesky, by_rotation):
                taken = milliseconds(lambda way=way, a=average, q=basis: way(a, q))
                show(what=way.__name__, num=num, side=side, kind=kind, ms=taken)


def drift() -> None:
    """What is left off the diagonal of Q' L Q, per row, after 40 refreshes while the eigenvectors turn."""
    side = 128
    sizes = torch.logspace(0, -2, side)[:, None]
    for speed in (0.0, 0.01, 0.05):
        torch.manual_seed(1)
        skew, left, average = speed * torch.randn(side, side) / side**0.5, {}, torch.zeros(1, side, side)
        turn, vectors = torch.matrix_exp(skew - skew.T), orthogonal(side).cpu()
        bases: dict[Callable[[Tensor, Tensor], Tensor], Tensor] = {}
        for step in range(403):
            grad = vectors @ (sizes * torch.randn(side, 2 * side))
            average, vectors = torch.lerp(average, (grad @ grad.T)[None], 0.05), vectors @ turn
            if step == 2:
                first = torch.linalg.eigh(average)[1].flip(-1)
                bases = dict.fromkeys((by_householder, by_cholesky, by_rotation), first)
            if step > 2 and step % 10 == 2:
                for way, basis in bases.items():
                    order = (basis * (average @ basis)).sum(1)[0].argsort(descending=True)
                    bases[way] = way(average, basis[:, :, order])
        for way, basis in bases.items():
            turned = (basis.mT @ average @ basis)[0]
            scale = turned.diagonal().rsqrt()
            left[way.__name__] = round(
                ((turned * scale * scale[:, None]).square().sum() / side - 1).item(), 4
            )
        show(what="drift", speed=speed, **left)


if __name__ == "__main__":
    for one in sys.argv[1:] or ("products", "kernels", "bases"):
        {"products": products, "kernels": kernels, "bases": bases, "drift": drift}[one]()
