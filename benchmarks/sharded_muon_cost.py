"""What directions of whole matrices cost where weights are sharded: bytes, products, and who has how much.

    python benchmarks/sharded_muon_cost.py

prints the tables of docs/sharding-cost.md. Owners and bytes follow from shapes and placements alone, by the
engine's own planner; the tests compare them with what a step really sends. Times are predictions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sharded_cost import Dims, Network, Shape

from merit_lab.measure.bench.model import WEIGHTS
from merit_optim.optim.axes.directions import MatrixDirection, Muon, Soap
from merit_optim.optim.engines.ranks.owners import Matrix, matrix_of, plan_of
from merit_optim.optim.engines.ranks.placements import Cutting, crossing_of
from merit_optim.optim.matrices import View

# Dense products on an H100 SXM, as NVIDIA states them: Newton-Schulz's in bfloat16, SOAP's in float32. How
# near they come is an assumption.
PEAK_BFLOAT16, PEAK_FLOAT32 = 989e12, 67e12
EFFICIENCY = 0.6


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank hands to the two all-to-alls of a process group, and gets from them."""

    sent: int
    received: int
    sent_back: int
    received_back: int


def traffic(
    params: Sequence[tuple[Shape, Dims]],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    direction: MatrixDirection | None = None,
    late: tuple[int, ...] = (),
) -> dict[tuple[int, ...], Traffic]:
    """What the rank at a coordinate sends and receives, for each set of mesh dimensions that cut matrices.

    A 4096 x 11008 weight split by rows over 64 ranks: each sends 64 rows in bfloat16 to the owner, the first
    rank, and gets them back.

    >>> traffic([((4096, 11008), [0])], [64], [0])[(0,)]
    Traffic(sent=1409024, received=90177536, sent_back=90177536, received_back=1409024)
    """
    found: dict[tuple[int, ...], Traffic] = {}
    for mesh_dims, matrices in gathered(params, mesh, coordinate, direction or Muon(), late).items():
        sizes = [mesh[mesh_dim] for mesh_dim in mesh_dims]
        rank = 0
        for mesh_dim, size in zip(mesh_dims, sizes, strict=True):
            rank = rank * size + coordinate[mesh_dim]
        plan = plan_of(matrices, rank, math.prod(sizes))
        found[mesh_dims] = Traffic(
            sent=sum(plan.there.part_splits),
            received=sum(plan.there.whole_splits),
            sent_back=sum(plan.back.whole_splits),
            received_back=sum(plan.back.part_splits),
        )
    return found


def gathered(
    params: Sequence[tuple[Shape, Dims]],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    direction: MatrixDirection,
    late: tuple[int, ...],
) -> dict[tuple[int, ...], list[Matrix]]:
    """The matrices that a rank's process groups put together, by the mesh dimensions that cut them."""
    found: dict[tuple[int, ...], list[Matrix]] = {}
    for shape, dims in params:
        crossing = crossing_of(len(shape), None, dims, mesh)
        if len(shape) > 1 and crossing.whole:
            ranges = [range(n) if i in crossing.whole else [coordinate[i]] for i, n in enumerate(mesh)]
            cutting = Cutting(shape, tuple(dims), tuple(mesh), late)
            at = tuple(itertools.product(*ranges))
            matrix = matrix_of(cutting, at, direction, View(), torch.float32)
            found.setdefault(crossing.whole, []).append(matrix)
    return found


def by_rows(model: str, num_ranks: int, direction: MatrixDirection | None = None) -> list[Matrix]:
    """The hidden matrices of a model, with FSDP2's placement."""
    params: list[tuple[Shape, Dims]] = [(w.shape, [0]) for w in WEIGHTS[model] if w.kind == "hidden"]
    (matrices,) = gathered(params, [num_ranks], [0], direction or Muon(), ()).values()
    return matrices


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of the busiest rank, of all together, and how many of them have none."""

    most: int
    total: int
    num_ranks: int
    num_idle: int

    @property
    def imbalance(self) -> float:
        """The largest share over the mean share."""
        return self.most * self.num_ranks / self.total


def load(matrices: Sequence[Matrix], owners: Sequence[int], num_ranks: int) -> Load:
    """How evenly work is shared.

    >>> matrices = by_rows("gpt2-small", 8)
    >>> round(load(matrices, plan_of(matrices, 0, 8).owners, 8).imbalance, 2)
    1.02
    """
    shares: Counter[int] = Counter()
    for matrix, owner in zip(matrices, owners, strict=True):
        shares[owner] += matrix.cost
    return Load(
        most=max(shares.values()),
        total=sum(shares.values()),
        num_ranks=num_ranks,
        num_idle=num_ranks - len(shares),
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The largest numbers of any rank: bytes it sends or receives in one of the two messages, operations."""

    num_bytes: int
    num_operations: int
    peak: float = PEAK_BFLOAT16

    def seconds(self, network: Network, num_ranks: int) -> tuple[float, float]:
        """Two messages, and the products."""
        messages = 2 * all_to_all_seconds(network, self.num_bytes, num_ranks)
        return messages, self.num_operations / (self.peak * EFFICIENCY)


def all_to_all_seconds(network: Network, num_bytes: int, num_ranks: int) -> float:
    """What goes to ranks of the same node takes NVLink, the rest each GPU's own network card."""
    per_node = min(num_ranks, network.gpus_per_node)
    within = (per_node - 1) / num_ranks * num_bytes / network.node_bandwidth
    between = (num_ranks - per_node) / num_ranks * num_bytes / network.network_bandwidth
    return network.start_latency + max(within, between) / network.efficiency


def ours(model: str, num_ranks: int, direction: MatrixDirection | None = None) -> Cost:
    matrices = by_rows(model, num_ranks, direction)
    plan = plan_of(matrices, 0, num_ranks)
    received: Counter[int] = Counter()
    for matrix, owner in zip(matrices, plan.owners, strict=True):
        for cut in matrix.sent_to(owner).cuts:
            received[owner] += math.prod(cut.shape) * cut.dtype.itemsize
    return Cost(
        # The first rank has the largest shards.
        num_bytes=max(sum(plan.there.part_splits), *received.values()),
        num_operations=load(matrices, plan.owners, num_ranks).most,
        peak=PEAK_FLOAT32 if isinstance(direction, Soap) else PEAK_BFLOAT16,
    )


def dion(model: str, num_ranks: int) -> Cost:
    """microsoft/dion's Muon (megabatch_base.py, 01287d7), as its code reads.

    Matrices of one shape are shared out together, in bfloat16, and filled up with zeros until every rank has
    as many of them.
    """
    shapes = Counter(w.shape for w in WEIGHTS[model] if w.kind == "hidden")
    num_bytes = num_operations = 0
    for (rows, columns), number in shapes.items():
        each = math.ceil(number / num_ranks)
        num_bytes += 2 * each * num_ranks * math.ceil(rows / num_ranks) * columns
        num_operations += each * Muon().num_operations(rows, columns)
    return Cost(num_bytes=num_bytes, num_operations=num_operations)


MODELS = {
    "gpt2-small": "GPT-2 small",
    "gpt2-medium": "GPT-2 medium",
    "gpt2-large": "GPT-2 large",
    "llama-7b": "Llama 7B",
}
NUM_RANKS = (8, 64, 512)


def main() -> None:
    network = Network()
    print("| model | hidden matrices | 8 ranks | 64 | 512 |\n|---|---|---|---|---|")
    for model, title in MODELS.items():
        cells = []
        for num_ranks in NUM_RANKS:
            matrices = by_rows(model, num_ranks)
            found = load(matrices, plan_of(matrices, 0, num_ranks).owners, num_ranks)
            idle = f" ({found.num_idle} idle)" if found.num_idle else ""
            cells.append(f"{found.imbalance:.2f}{idle}")
        print(f"| {title} | {len(matrices)} | {' | '.join(cells)} |")
    print("\n| | ranks | MB each way | 1e12 operations | ms of messages | ms of products |")
    print("|---|---|---|---|---|---|")
    for num_ranks in (8, 512):
        costs = {
            "Muon here": ours("llama-7b", num_ranks),
            "dion": dion("llama-7b", num_ranks),
            "SOAP here": ours("llama-7b", num_ranks, Soap()),
        }
        for name, cost in costs.items():
            messages, products = cost.seconds(network, num_ranks)
            print(
                f"| {name} | {num_ranks} | {cost.num_bytes / 1e6:.0f} | {cost.num_operations / 1e12:.1f} "
                f"| {messages * 1e3:.1f} | {products * 1e3:.1f} |"
            )
        print(f"| AdamW | {num_ranks} | 0 | 0 | 0 | 0 |")


if __name__ == "__main__":
    main()
