"""Newton-Schulz for matrices of one shape, in a few launches: what directions/newton_schulz.py defines."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.directions import Muon
from merit_optim.optim.directions.newton_schulz import Coefficients
from merit_optim.optim.engines import interpreting
from merit_optim.optim.engines.fused import product_kernels as kernels
from merit_optim.optim.engines.fused.compiled import Kernel


class Tile(NamedTuple):
    """What one program computes of a product, how much it adds up at a time, and by how many warps."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def launch_options(self) -> dict[str, int]:
        return {"BLOCK_K": self.inner, "num_warps": self.warps, "num_stages": self.stages}

    def divides(self, rows: int, columns: int, inner: int) -> bool:
        return not (rows % self.rows or columns % self.columns or inner % self.inner)


# The best of those that benchmarks/products.py measures on an H200; docs/performance.md has the figures.
SYMMETRIC_TILE = Tile(128, 128, 64, warps=4, stages=3)
PRODUCT_TILE = Tile(128, 256, 64, warps=8, stages=4)
NEIGHBOURS = 8

BLOCK = 8192
BLOCK_SUMS = 256


class Iteration(NamedTuple):
    """What matrices have in common that are worked on together."""

    rows: int
    columns: int
    coefficients: Coefficients
    num_passes: int
    eps: float

    @staticmethod
    def of(direction: Muon, rows: int, columns: int) -> Iteration:
        return Iteration(rows, columns, direction.coefficients, direction.ns_steps, direction.eps)

    @property
    def num_flops(self) -> int:
        """Of one matrix, all products counted in full."""
        m, k = sorted((self.rows, self.columns))
        return self.num_passes * (4 * m * m * k + 2 * m**3)


class Polar:
    """The polar factors of ``num`` matrices, with the kernels kept between steps."""

    def __init__(self, num: int, iteration: Iteration) -> None:
        rows, columns = self.shape = iteration[:2]
        self.num, self.is_tall = num, rows > columns
        self.m, self.k = min(rows, columns), max(rows, columns)
        self.passes = iteration.coefficients.first(iteration.num_passes)
        self.margin, self.eps = iteration.coefficients.margin, iteration.eps
        self.num_elements, self.num_blocks = rows * columns, ceil(rows * columns / BLOCK)
        same = {"WIDEN": interpreting()}
        self._gram = _symmetric(num, self.m, self.k, TALL=self.is_tall, POLYNOMIAL=False, **same)
        self._square = _symmetric(num, self.m, self.m, TALL=False, POLYNOMIAL=True, **same)
        tile = PRODUCT_TILE
        self._product = Kernel(
            kernels.product,
            num * ceil(rows / tile.rows) * ceil(columns / tile.columns),
            EVEN=tile.divides(rows, columns, self.m),
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            GROUP=NEIGHBOURS,
            **same,
            **tile.launch_options,
        )
        self._squares = Kernel(kernels.squares, num * self.num_blocks, BLOCK=BLOCK, num_warps=8)
        self._normalize = Kernel(
            kernels.normalize, num * self.num_blocks, BLOCK=BLOCK, BLOCK_SUMS=BLOCK_SUMS, num_warps=8
        )

    def __call__(self, n_NRC: Tensor) -> Tensor:
        """The polar factors; ``n`` is overwritten.

        Temporaries: as much again, and two squares of the smaller side.
        """
        x, y = n_NRC, torch.empty_like(n_NRC)
        gram, polynomial = n_NRC.new_empty(2, self.num, self.m, self.m)
        sums = torch.empty(self.num * self.num_blocks, dtype=torch.float64, device=n_NRC.device)
        sized = self.num_elements, self.num_blocks
        self._squares(x, sums, *sized)
        self._normalize(x, sums, self.margin, self.eps, *sized)
        rows, columns = self.shape
        for a, b, c in self.passes:
            self._gram(x, gram, self.m, self.k, 0.0, 1.0)
            self._square(gram, polynomial, self.m, self.m, b, c)
            left, right = (x, polynomial) if self.is_tall else (polynomial, x)
            self._product(left, right, x, y, rows, columns, self.m, a)
            x, y = y, x
        return x


def _symmetric(num: int, m: int, k: int, **constants: bool) -> Kernel:
    tile = SYMMETRIC_TILE
    num_tiles = ceil(m / tile.rows)
    return Kernel(
        kernels.symmetric,
        num * num_tiles * (num_tiles + 1) // 2,
        EVEN=tile.divides(m, m, k),
        BLOCK_M=tile.rows,
        **constants,
        **tile.launch_options,
    )
