"""Lower bounds on the time of a step: bytes that must be moved, and products that must be computed.

    bytes     weights and state are read and written once, gradients read once; all are float32
    products  for Muon, Newton-Schulz: each pass over an m x n matrix with m <= n has X X' and B X, with
              2 m^2 n operations each, and A A, with 2 m^3. Whole products are counted, though A and B are
              symmetric and half of each would do.

The bound is the time of the bytes at the speed of a copy, plus that of the products at the speed of a
large one.
"""

from __future__ import annotations

from dataclasses import dataclass

from merit_lab.measure.bench.shapes import Shape, WeightSpec
from merit_optim.optim.directions import Muon

ADAM_BYTES = 28  # per element: w, m and v read and written, g read
TWO_PASS_BYTES = 40  # w, m and v are read twice: the norms of rows and columns come first
MUON_BYTES = 20  # w and the momentum read and written, g read


@dataclass(frozen=True)
class Floor:
    """The bytes and operations that a step needs at least."""

    what: str
    num_bytes: int
    num_flops: int = 0

    def milliseconds(self, copy_tb_s: float, matrix_tflop_s: float) -> float:
        return self.num_bytes / copy_tb_s / 1e9 + self.num_flops / matrix_tflop_s / 1e9


def newton_schulz_flops(shape: Shape) -> int:
    """Operations of Newton-Schulz on one matrix."""
    rows, columns = shape
    return Muon().num_operations(rows, columns)


def floors_of(weights: list[WeightSpec]) -> list[Floor]:
    """The floors of a model's step: AdamW's, MERIT's, and Muon's if it has hidden matrices."""
    total = sum(weight.num_elements for weight in weights)
    hidden = [weight for weight in weights if weight.kind == "hidden"]
    floors = [
        Floor("28 bytes: AdamW's traffic", ADAM_BYTES * total),
        Floor("40 bytes: MERIT's in two passes", TWO_PASS_BYTES * total),
    ]
    if hidden:
        num_hidden = sum(weight.num_elements for weight in hidden)
        num_bytes = MUON_BYTES * num_hidden + ADAM_BYTES * (total - num_hidden)
        num_flops = sum(newton_schulz_flops(weight.shape) for weight in hidden)
        floors.append(Floor("Muon's traffic and products", num_bytes, num_flops))
    return floors
