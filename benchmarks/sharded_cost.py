"""What the exchange of a sharded step costs: the bytes exactly, the time by NCCL's own model of latencies.

    python benchmarks/sharded_cost.py

prints the table of docs/sharding-cost.md. Bytes follow from shapes and placements alone, by the engine's own
planner; the tests compare them with what a step really sends. Times are predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from merit_optim.optim.engines.ranks.placements import crossing_of
from merit_optim.optim.matrices import matrices_of

Shape = tuple[int, ...]
Dims = Sequence[int | None]
"""For each mesh dimension the tensor dimension that it shards; None: none."""


def local_shape(shape: Shape, dims: Dims, mesh: Sequence[int]) -> Shape:
    """The shape of the first rank's shard, which is the largest.

    >>> local_shape((10, 7), [0, 1], [4, 2])
    (3, 4)
    """
    sizes = list(shape)
    for dim, num_ranks in zip(dims, mesh, strict=True):
        if dim is not None:
            sizes[dim] = math.ceil(sizes[dim] / num_ranks)
    return tuple(sizes)


def exchange_bytes(
    params: Sequence[tuple[Shape, Dims]],
    mesh: Sequence[int],
    *,
    element_wise: bool = True,
    is_sum: bool = False,
) -> list[int]:
    """The bytes of a rank's message in the all-reduce of each mesh dimension: one all-reduce, or none (0).

    Sizes of w and of u, in float32 where the largest is taken and float64 where squares are added. A
    4096 x 11008 weight split by rows sends 11008 columns and one whole:

    >>> exchange_bytes([((4096, 11008), [0])], [64])
    [88072]
    """
    counts = [0] * len(mesh)
    for shape, dims in params:
        crossing = crossing_of(len(shape), None, dims, mesh)
        matrices = matrices_of(local_shape(shape, dims, mesh))
        for mesh_dim in range(len(mesh)):
            if element_wise and mesh_dim in crossing.rows:
                counts[mesh_dim] += matrices.rows
            if element_wise and mesh_dim in crossing.columns:
                counts[mesh_dim] += matrices.columns
            if mesh_dim in crossing.whole:
                counts[mesh_dim] += 1
    return [2 * (8 if is_sum else 4) * count for count in counts]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A cluster of nodes: bytes a second for each GPU, seconds for each hop."""

    gpus_per_node: int = 8
    # NVLink 4: 900 GB/s of an H100, half of it in each direction. NDR InfiniBand: 400 Gb/s for each GPU.
    node_bandwidth: float = 450e9
    network_bandwidth: float = 50e9
    # What of that a collective reaches: an assumption.
    efficiency: float = 0.7
    # NCCL's tuning model, LL128 protocol (src/graph/tuning.cc of NCCL): hops within and between nodes.
    ring_latency: tuple[float, float] = (1.9e-6, 4.0e-6)
    tree_latency: tuple[float, float] = (1.25e-6, 8.5e-6)
    start_latency: float = 14e-6

    def all_reduce_seconds(self, num_bytes: int, num_ranks: int, ranks_per_node: int) -> float:
        """The faster of ring and tree, for a group with so many ranks on each of its nodes."""
        if num_ranks == 1 or num_bytes == 0:
            return 0.0
        num_nodes = math.ceil(num_ranks / ranks_per_node)
        per_node = min(num_ranks, ranks_per_node)
        bandwidth = self.node_bandwidth
        if num_nodes > 1:
            # Each rank of the group on a node brings its own network card.
            bandwidth = min(bandwidth, self.network_bandwidth * per_node)
        bandwidth *= self.efficiency
        within, between = self.ring_latency
        num_steps, num_between = 2 * (num_ranks - 1), 2 * (num_nodes - 1)
        ring = (num_steps - num_between) * within + num_between * between
        ring += num_steps / num_ranks * num_bytes / bandwidth
        within, between = self.tree_latency
        tree = 2 * ((per_node - 1) * within + math.log2(num_nodes) * between)
        tree += 2 * num_bytes / bandwidth
        return self.start_latency + min(ring, tree)


@dataclass(frozen=True, kw_only=True)
class Llama:
    """The parameters of a Llama, by the part they play."""

    width: int
    hidden: int
    depth: int
    key_value_width: int
    vocabulary: int

    def parameters(self) -> list[tuple[str, Shape, int]]:
        """Part, shape, and how many there are."""
        width, layers = self.width, self.depth
        return [
            ("embedding", (self.vocabulary, width), 1),
            ("query", (width, width), layers),
            ("key", (self.key_value_width, width), layers),
            ("value", (self.key_value_width, width), layers),
            ("attention output", (width, width), layers),
            ("gate", (self.hidden, width), layers),
            ("up", (self.hidden, width), layers),
            ("down", (width, self.hidden), layers),
            ("norm", (width,), 2 * layers + 1),
            ("output", (self.vocabulary, width), 1),
        ]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) * number for _, shape, number in self.parameters())


LLAMAS = {
    "7B": Llama(width=4096, hidden=11008, depth=32, key_value_width=4096, vocabulary=32000),
    "70B": Llama(width=8192, hidden=28672, depth=80, key_value_width=1024, vocabulary=128256),
    "405B": Llama(width=16384, hidden=53248, depth=126, key_value_width=1024, vocabulary=128256),
}

# What tensor parallelism splits by columns, and what it leaves whole. The rest it splits by rows.
BY_COLUMNS, REPLICATED = {"attention output", "down"}, {"norm"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks replicate, shard (FSDP2, rows) and share the work of a layer (tensor parallel)."""

    name: str
    replicate: int = 1
    shard: int
    tensor: int = 1

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.tensor

    def placed(self, model: Llama) -> list[tuple[Shape, list[int | None]]]:
        """Every parameter with its placement on the (replicate, shard, tensor) mesh."""
        placed: list[tuple[Shape, list[int | None]]] = []
        for part, shape, number in model.parameters():
            tensor_dim = None if part in REPLICATED else 1 if part in BY_COLUMNS else 0
            placed += [(shape, [None, 0, tensor_dim])] * number
        return placed


def layouts(num_ranks: int) -> list[Layout]:
    return [
        Layout(name="FSDP2", shard=num_ranks),
        Layout(name="HSDP, 64 a replica", replicate=num_ranks // 64, shard=64),
        Layout(name="FSDP2, TP 8", shard=num_ranks // 8, tensor=8),
    ]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one step, for one rank."""

    num_bytes: int
    """In all messages."""
    seconds: float
    traffic_share: float
    """Of the bytes that FSDP2 itself moves in a step: weights gathered twice and gradients scattered once, in
    bf16."""


def cost(model: Llama, layout: Layout, network: Network) -> Cost:
    mesh = [layout.replicate, layout.shard, layout.tensor]
    _, over_shard, over_tensor = exchange_bytes(layout.placed(model), mesh)
    per_node = max(1, network.gpus_per_node // layout.tensor)
    seconds = network.all_reduce_seconds(over_shard, layout.shard, per_node)
    seconds += network.all_reduce_seconds(over_tensor, layout.tensor, network.gpus_per_node)
    fsdp_bytes = 3 * 2 * model.num_parameters / layout.tensor
    # An all-reduce moves its message twice.
    share = 2 * over_shard / fsdp_bytes
    return Cost(num_bytes=over_shard + over_tensor, seconds=seconds, traffic_share=share)


def main() -> None:
    network = Network()
    print(
        "| model | GPUs | layout | MB a rank and step | ms | of FSDP2's traffic |\n|---|---|---|---|---|---|"
    )
    for name, model in LLAMAS.items():
        for num_ranks in (64, 512, 4096, 16384):
            for layout in layouts(num_ranks):
                if layout.name.startswith("HSDP") and layout.replicate == 1:
                    continue
                c = cost(model, layout, network)
                print(
                    f"| {name} | {num_ranks} | {layout.name} | {c.num_bytes / 1e6:.1f} "
                    f"| {c.seconds * 1e3:.2f} | {c.traffic_share:.2%} |"
                )


if __name__ == "__main__":
    main()
