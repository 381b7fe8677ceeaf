"""What the ranks of test_sharded*.py share: values, placements, a comparison, a report."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from merit_optim import LAMB, MERIT, Lion, MaxLAMB, MuonMERIT

NUM_STEPS = 6
# Uneven and empty shards included: 1 row, 5 rows, prime sizes, vectors.
SHAPES = [(16, 12), (5, 7), (1, 9), (3, 4, 5), (13,), (2,)]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "MERIT": MERIT,
    "MERIT without bound": lambda p: MERIT(p, weight_bound=False),
    "MERIT-W": lambda p: MERIT(p, element_wise=False),
    "MERIT stacked": lambda p: MERIT(p, matrix_dims=2, clip=None),
    "MERIT corrected": lambda p: MERIT(p, bias_correction=True, maximize=True),
    "MERIT with l2 norms": lambda p: MERIT(p, norm="l2"),
    "MERIT, norm clipped": lambda p: MERIT(p, max_grad_norm=0.1),
    "MERIT without ratios": lambda p: MERIT(p, norm="none", bias_correction=True),
    "MERIT with bounded ratios": lambda p: MERIT([{"params": p, "ratio_bounds": (0.2, 0.5)}]),
    "MaxLAMB": MaxLAMB,
    "LAMB": LAMB,
    "Lion": Lion,
    "MERIT, fused": lambda p: MERIT(p, fused=True),
    "MaxLAMB, fused": lambda p: MaxLAMB(p, fused=True),
    # Muon's direction needs whole matrices: every fourth is one.
    "every fourth MuonMERIT": lambda p: MuonMERIT(
        [{"params": some, "direction": "adam"} for some in (p[0::4], p[1::4], p[2::4])]
        + [{"params": p[3::4], "direction": "muon"}]
    ),
}
# Sums: they are added in another order.
WITHIN_TOLERANCE = {"LAMB", "MERIT with l2 norms", "MERIT, norm clipped"}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every rank has, placed as a parameter is."""
    if not isinstance(like, DTensor):
        return full.clone()
    everywhere = [Replicate()] * like.device_mesh.ndim
    replicated = distribute_tensor(full.clone(), like.device_mesh, everywhere, src_data_rank=None)
    return replicated.redistribute(like.device_mesh, like.placements)


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def same(name: str, actual: Tensor, expected: Tensor) -> bool:
    if name in WITHIN_TOLERANCE:
        return torch.allclose(whole(actual), expected.detach(), rtol=1e-5, atol=1e-6)
    return torch.equal(whole(actual), expected.detach())


def set_gradients(params: list[Tensor], shapes: list[tuple[int, ...]], step: int) -> None:
    """Those of a step, the same on every rank and in every layout."""
    for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
        param.grad = placed(values(shape, 1000 * step + i, param.dtype), param)


Change = Callable[[int, list[Tensor]], None]


def compare(
    name: str,
    params: list[Tensor],
    fulls: list[Tensor],
    change: Change | None = None,
    num_steps: int = NUM_STEPS,
) -> list[str]:
    """Take steps with the sharded parameters and with the whole ones; what differs afterwards.

    ``change`` is told the step, and may do to either list of parameters what a user would.
    """
    references: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
    shapes = [tuple(full.shape) for full in fulls]
    optimizers = []
    for some in (params, references):
        optimizers.append(OPTIMIZERS[name](some))
        for step in range(num_steps):
            set_gradients(some, shapes, step)
            if change is not None:
                change(step, some)
            optimizers[-1].step()
    sharded, reference = optimizers
    wrong = []
    for i, (param, full) in enumerate(zip(params, references, strict=True)):
        if not same(name, param, full):
            wrong.append(f"weight {i} {tuple(full.shape)}")
        for key, state in reference.state[full].items():
            if not same(name, sharded.state[param][key], state):
                wrong.append(f"{key} {i} {tuple(full.shape)}")
    return wrong


def report(found: dict[str, list[str]]) -> None:
    """Print, on the first rank, what was compared and what differed anywhere; then leave together."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if dist.get_rank() == 0:
        merged = {case: sorted({w for one in everywhere for w in one[case]}) for case in found}
        print("RESULT " + json.dumps(merged), flush=True)
    dist.barrier()  # nobody leaves while another still listens
    dist.destroy_process_group()
