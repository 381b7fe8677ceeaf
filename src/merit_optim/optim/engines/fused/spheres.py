"""The spheres of one launch: their products, summed between the phases, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor

from merit_optim.optim.engines.fused import hold_kernels
from merit_optim.optim.engines.fused.compiled import Kernel
from merit_optim.optim.engines.fused.layout import NUM_PRODUCTS
from merit_optim.optim.engines.fused.tables import KernelWeight
from merit_optim.optim.engines.work import Control

BLOCK_ROWS, BLOCK_LINES = 128, 1024


class Spheres:
    """Matrices of one width, each of which is held on a sphere."""

    def __init__(self, weights: Sequence[KernelWeight], width: int, state: Any, device: torch.device) -> None:
        """``width``: that of a panel of columns."""
        self._device = device
        self.num_rows = [w.rows for w in weights]
        """Those on this rank; a line is a row of a whole matrix."""
        table, self._num_lines = [], 0
        for w in weights:
            assert w.extent is not None
            table.append((w.radius_at, self._num_lines, w.extent.num_rows, w.group))
            self._num_lines += w.extent.num_rows
        self._num_panels = ceil(weights[0].columns / width)
        self._stride = 2 * self._num_lines + hold_kernels.SPARE.value * len(weights)
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._named = torch.tensor([w.named_radius for w in weights], dtype=torch.float32, device=device)
        same = {"enable_fp_fusion": False}  # the eager engine's bits, from the same products
        self._sum_panels = Kernel(
            hold_kernels.sum_panels, ceil(sum(self.num_rows) / BLOCK_ROWS), BLOCK=BLOCK_ROWS, **same
        )
        self._settle = Kernel(hold_kernels.settle, len(weights), STATE=state, BLOCK=BLOCK_LINES, **same)

    def products(self) -> Tensor:
        """Memory for the products of each row in each panel."""
        num = sum(self.num_rows) * self._num_panels * NUM_PRODUCTS.value
        return torch.empty(num, dtype=torch.float32, device=self._device)

    def lines(self, products: Tensor) -> Tensor:
        """The products of rows, as (product, ...): those of all rows here, and room for more."""
        lines = torch.empty(NUM_PRODUCTS.value, self._stride, dtype=torch.float32, device=self._device)
        self._sum_panels(products, lines, sum(self.num_rows), self._num_panels, self._stride)
        return lines

    def settle(self, lines: Tensor, hyper: Tensor, control: Control) -> Tensor:
        """a and b of each matrix, from the products of all its lines; also begin the radii."""
        shares = torch.empty(len(self.num_rows), 2, dtype=torch.float32, device=self._device)
        self._settle(
            self._table,
            self._named,
            hyper,
            lines,
            shares,
            hyper if control.skip is None else control.skip.view(torch.uint8),
            self._num_lines,
            self._stride,
            HAS_SKIP=control.skip is not None,
        )
        return shares
