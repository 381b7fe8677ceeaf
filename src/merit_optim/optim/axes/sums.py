"""Sums whose bits do not depend on how a tensor is cut, stacked or stored."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_in_order(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, which is kept, by adding its halves to each other.

    torch's own depends, in the last bits, on how many matrices are stacked, and on the layout; engines may
    stack any number, and a rank has some of the rows.
    """
    while (length := x.shape[dim]) > 1:
        half = length // 2
        first, second, odd = x.split((half, half, length % 2), dim)
        x = torch.cat((first + second, odd), dim) if length % 2 else first + second
    return x.sum(dim, keepdim=True)  # of one element, or none
