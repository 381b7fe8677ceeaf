"""Newton-Schulz, as defined in directions/newton_schulz.py, for matrices of one shape in a few launches."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.axes.directions import Muon
from merit_optim.optim.axes.directions.newton_schulz import Coefficients, Pass
from merit_optim.optim.engines import interpreting
from merit_optim.optim.engines.fused import product_kernels as kernels
from merit_optim.optim.engines.fused.compiled import Kernel


class ProductTile(NamedTuple):
    """The part of a product that one program computes, its inner block, and its warps and stages."""

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


# The fastest tiles that benchmarks/products.py measured on an H200; see docs/performance.md.
SYMMETRIC_TILE = ProductTile(128, 128, 64, warps=4, stages=3)
PRODUCT_TILE = ProductTile(128, 256, 64, warps=8, stages=4)
NEIGHBOURS = 8

# Passes are taken in pairs if one side is at least this many times as long as the other.
PAIRED = 2

# The dtype of X between the first and the last product, by the dtype of the input and output. X has norm 1,
# so nothing is too large for float16, which has eight times the precision of bfloat16 at the same speed.
ROUNDED_IN = {torch.bfloat16: torch.float16}

BLOCK = 8192
BLOCK_SUMS = 256
BLOCK_OUTPUTS, BLOCK_INPUTS = 32, 64


class Iteration(NamedTuple):
    """What matrices that are processed together have in common."""

    rows: int
    columns: int
    coefficients: Coefficients
    num_passes: int
    eps: float
    output_dim: int | None = None
    """The dimension of the outputs that NorMuon measures."""

    @staticmethod
    def of(direction: Muon, rows: int, columns: int) -> Iteration:
        d = direction
        output_dim = None if d.neuron_beta is None else d.output_dim
        return Iteration(rows, columns, d.coefficients, d.ns_steps, d.ns_eps, output_dim)

    @property
    def num_outputs(self) -> int:
        return self.columns if self.output_dim == 2 else self.rows


def num_together(num: int, num_elements: int, most: int) -> int:
    """How many of ``num`` matrices to process at a time, so that they have at most ``most`` elements.

    Batches are of nearly equal size: a small last one would leave most of the GPU idle.
    """
    at_most = max(1, most // num_elements)
    return ceil(num / ceil(num / at_most))


class Polar:
    """The polar factors of ``num`` matrices, with the kernels kept between steps.

    Passes are taken in pairs if one side is much longer. With B = b*A + c*A*A of each pass, both
    (a2 + B2)(a1 + B1) and A of the second pass, (a1 + B1) A (a1 + B1), are matrices of the smaller side. This
    takes five more products of the smaller sides and saves two of three with X.
    """

    def __init__(self, num: int, iteration: Iteration) -> None:
        rows, columns = self.shape = iteration[:2]
        self.num, self.is_tall = num, rows > columns
        self.m, self.k = min(rows, columns), max(rows, columns)
        self.passes = iteration.coefficients.first(iteration.num_passes)
        self.num_pairs = iteration.num_passes // 2 if self.k >= PAIRED * self.m else 0
        self.margin, self.eps = iteration.coefficients.margin, iteration.eps
        self.num_elements, self.num_blocks = rows * columns, ceil(rows * columns / BLOCK)
        self._gram = self._symmetric(self.k, TALL=self.is_tall, POLYNOMIAL=False)
        self._polynomial = self._symmetric(self.m, TALL=False, POLYNOMIAL=True)
        self._product, self._last_product = self._with_x(), self._with_x()  # the dtypes differ
        self.output_dim, self.num_outputs = iteration.output_dim, iteration.num_outputs
        self._mean_squares = Kernel(
            kernels.mean_squares,
            num * ceil(self.num_outputs / BLOCK_OUTPUTS),
            BLOCK_O=BLOCK_OUTPUTS,
            BLOCK_I=BLOCK_INPUTS,
        )
        self._squares = Kernel(kernels.squares, num * self.num_blocks, BLOCK=BLOCK, num_warps=8)
        self._normalize = Kernel(
            kernels.normalize, num * self.num_blocks, BLOCK=BLOCK, BLOCK_SUMS=BLOCK_SUMS, num_warps=8
        )

    def _with_x(self) -> Kernel:
        rows, columns = self.shape
        tile = PRODUCT_TILE
        return Kernel(
            kernels.product,
            self.num * ceil(rows / tile.rows) * ceil(columns / tile.columns),
            EVEN=tile.divides(rows, columns, self.m),
            WIDEN=interpreting(),
            BLOCK_R=tile.rows,
            BLOCK_C=tile.columns,
            GROUP=NEIGHBOURS,
            **tile.launch_options,
        )

    def _symmetric(self, k: int, **constants: bool) -> Kernel:
        tile = SYMMETRIC_TILE
        num_tiles = ceil(self.m / tile.rows)
        return Kernel(
            kernels.symmetric,
            self.num * num_tiles * (num_tiles + 1) // 2,
            EVEN=tile.divides(self.m, self.m, k),
            WIDEN=interpreting(),
            BLOCK_M=tile.rows,
            **constants,
            **tile.launch_options,
        )

    def __call__(self, n_NRC: Tensor) -> Tensor:
        """Return the polar factors; ``n`` is overwritten.

        Temporaries: one copy, and two squares of the smaller side; three if passes are taken in pairs.
        """
        x = n_NRC.view(ROUNDED_IN.get(n_NRC.dtype, n_NRC.dtype))
        y = torch.empty_like(x)
        # Allocated separately: kernels are compiled for the alignment of their first arguments.
        num_squares = 3 if self.num_pairs else 2
        squares = [x.new_empty(self.num, self.m, self.m) for _ in range(num_squares)]
        self.normalize(n_NRC, x)
        passes = iter(self.passes)
        num_turns = len(self.passes) - self.num_pairs
        for turn in range(num_turns):
            is_last = turn == num_turns - 1
            out = y.view(n_NRC.dtype) if is_last else y
            if turn < self.num_pairs:
                both = self.two_passes(x, next(passes), next(passes), *squares)
                self.apply(both, x, out, is_last=is_last)
            else:
                gram, polynomial = squares[:2]
                a, b, c = next(passes)
                self.gram(x, gram)
                self.combine(gram, gram, polynomial, c, b)
                self.apply(polynomial, x, out, a, is_last=is_last)
            x, y = y, x
        return x.view(n_NRC.dtype)

    def whole(self, n_NRC: Tensor) -> tuple[Tensor, ...]:
        """Muon's ``whole``: the polar factors and, for NorMuon, the mean squares; ``n`` is overwritten."""
        x_NRC = self(n_NRC)
        if self.output_dim is None:
            return (x_NRC,)
        shape, strides = [self.num, *self.shape], x_NRC.stride()
        input_dim = 3 - self.output_dim
        sized = shape[self.output_dim], shape[input_dim], strides[self.output_dim], strides[input_dim]
        shape[input_dim] = 1
        mean_sq = torch.empty(shape, dtype=torch.float32, device=n_NRC.device)
        self._mean_squares(x_NRC, mean_sq, *sized)
        return x_NRC, mean_sq

    def two_passes(
        self, x: Tensor, first: Pass, second: Pass, one: Tensor, two: Tensor, three: Tensor
    ) -> Tensor:
        """The factor of X in two passes; the squares are overwritten."""
        (a1, b1, c1), (a2, b2, c2) = first, second
        self.gram(x, one)
        self.combine(one, one, two, c1, b1)  # B1
        self.combine(two, one, three, 1.0, a1)  # (a1 + B1) A
        self.combine(two, three, one, 1.0, a1)  # A of the second pass
        self.combine(one, one, three, c2, b2)  # B2
        self.combine(three, two, one, 1.0, a2, a1, a1 * a2)
        return one

    def normalize(self, n: Tensor, x: Tensor) -> None:
        """Write N, normalized to norm 1, to X, which may share its memory."""
        sums = torch.empty(self.num * self.num_blocks, dtype=torch.float64, device=n.device)
        sized = self.num_elements, self.num_blocks
        self._squares(n, sums, *sized)
        self._normalize(n, x, sums, self.margin, self.eps, *sized)

    def gram(self, x: Tensor, out: Tensor) -> None:
        """X X'."""
        self._gram(x, x, out, self.m, self.k, 1.0, 0.0, 0.0, 0.0, HAS_LEFT=False)

    def combine(
        self,
        left: Tensor,
        right: Tensor,
        out: Tensor,
        share_of_product: float,
        share_of_right: float,
        share_of_left: float = 0.0,
        share_of_one: float = 0.0,
    ) -> None:
        """Write the sum of multiples of left*right, right, left and the identity; both commute."""
        shares = share_of_product, share_of_right, share_of_left, share_of_one
        self._polynomial(left, right, out, self.m, self.m, *shares, HAS_LEFT=share_of_left != 0)

    def apply(
        self, polynomial: Tensor, x: Tensor, out: Tensor, share_of_x: float = 0.0, *, is_last: bool = False
    ) -> None:
        """polynomial*X + share*X."""
        left, right = (x, polynomial) if self.is_tall else (polynomial, x)
        product = self._last_product if is_last else self._product
        product(left, right, x, out, *self.shape, self.m, share_of_x, HAS_X=share_of_x != 0)
