"""Shared by the ranks of test_sharded*.py: values, placements, a comparison, a report."""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from merit_optim import (
    LAMB,
    MERIT,
    SOAP,
    SOAPMERIT,
    Lion,
    MaxLAMB,
    Muon,
    MuonMERIT,
    MuonSphere,
    Muown,
    NorMuon,
    NorMuonSphere,
    OrScale,
    SOAPMuon,
    compose,
)
from merit_optim.optim.groups import divided

NUM_STEPS = 6
NUM_MATRIX_STEPS = 20
# Uneven and empty shards included: 1 row, 5 rows, prime sizes, vectors.
SHAPES = [(16, 12), (5, 7), (1, 9), (3, 4, 5), (13,), (2,)]

Build = Callable[..., torch.optim.Optimizer]


def hidden(kind: Build, **options: Any) -> Build:
    """An optimizer of hidden matrices: all weights except vectors."""

    def build(params: list[Tensor], **more: Any) -> torch.optim.Optimizer:
        kinds = {param: {"kind": "hidden" if param.ndim > 1 else "vector"} for param in params}
        return kind(divided({"params": params}, kinds), **options, **more)

    return build


OF_MATRICES: dict[str, Build] = {
    "MuonMERIT": hidden(MuonMERIT, ratio_bounds=None, neuron_beta=None),
    "MuonMERIT without bound": hidden(
        MuonMERIT,
        weight_bound=False,
        ratio_bounds=None,
        ns_dtype="float32",
        nesterov=False,
        neuron_beta=None,
    ),
    "MuonMERIT stacked": hidden(MuonMERIT, ratio_bounds=None, matrix_dims=2),
    "Muon": hidden(Muon),
    "Muon, float16": hidden(Muon, ns_dtype="float16", scale="original", maximize=True),
    "NorMuon": hidden(NorMuon),
    "NorMuon stacked": hidden(NorMuon, matrix_dims=2, ns_dtype="float32"),
    "OrScale": hidden(OrScale),
    "OrScale stacked": hidden(OrScale, matrix_dims=2),
    # The basis of 60 columns is left out; bases are improved several times.
    "SOAPMERIT": hidden(SOAPMERIT, precondition_frequency=4, max_precond_dim=20),
    "SOAPMERIT stacked": hidden(SOAPMERIT, precondition_frequency=3, matrix_dims=2),
    "SOAP": hidden(SOAP, precondition_frequency=3, shampoo_beta=0.9),
    "SOAPMuon": hidden(SOAPMuon, precondition_frequency=3),
    "MuonSphere": hidden(MuonSphere),
    "MuonSphere stacked": hidden(MuonSphere, matrix_dims=2, gain=1.4),
}
# Cut along their first dimension, these give one process's bits too.
BY_ROWS: dict[str, Build] = {
    "spheres of matrices": hidden(NorMuonSphere),
    "spheres of rows": hidden(MuonSphere, sphere_of="row", matrix_dims=2),
    "spheres of MERIT's changes": hidden(MuonSphere, ratio="merit", ratio_bounds=(0.0, 0.5)),
    "rows": hidden(Muown),
    "angular rows": hidden(Muown, angular=True, matrix_dims=2),
    "a floor of rows": lambda p: compose(p, direction="sign", ratio="floor", hold="cautious", lr=1e-2),
    "displacement": lambda p: compose(p, direction="two-averages", hold="displacement", lr=1e-2),
    "corrected": lambda p: compose(p, direction="sgd", ratio="row", hold="corrected", lr=1e-2),
}

_MERIT = {"ratio": "merit", "norm": "max", "element_wise": True, "weight_bound": True, "clip": 1.0}
_UNSCALED = {"ratio": "none"}
# One group per weight: every direction, ratio and view that can be sharded, in one optimizer.
MIXED: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((16, 12), {"direction": "muon"}),
    ((1, 9), {"direction": "muon", "neuron_beta": None}),
    ((9, 4), {"direction": "muon", "ns_dtype": "float32", "nesterov": False, "weight_bound": False}),
    ((5, 7), {"direction": "muon", "neuron_beta": 0.9, "scale": "original", **_UNSCALED}),
    ((6, 3, 2, 2), {"direction": "muon", "ns_steps": 3, "ns_coefficients": "polar-express"}),
    ((5, 4, 6), {"direction": "muon", "matrix_dims": 2, "neuron_beta": 0.9}),
    ((24, 5), {"direction": "muon", "split": 3, "neuron_beta": None}),
    ((8, 14), {"direction": "muon", "split": (6, 4, 4), "split_dim": 1, "neuron_beta": None}),
    ((12, 5), {"direction": "muon", "split": [4, 6, 2], "neuron_beta": 0.9, **_UNSCALED}),
    ((9, 6), {"direction": "muon", "neuron_beta": 0.9, "scale": "original", "transposed": True}),
    ((4, 5, 6), {"direction": "muon", "matrix_dims": 2, "neuron_beta": 0.9, "transposed": True}),
    ((5, 12), {"direction": "muon", "split": [4, 6, 2], "neuron_beta": 0.9, "transposed": True, **_UNSCALED}),
    ((12, 8), {"direction": "soap", "precondition_frequency": 5}),
    ((3, 6, 4), {"direction": "soap", "precondition_frequency": 4, "matrix_dims": 2, **_UNSCALED}),
    ((10, 6), {"direction": "adam", "split": (3, 7), **_MERIT}),
    ((7, 3), {"direction": "adam", "ratio": "weight", "norm": "max", "clip": 1.0, "calibrated": True}),
    ((13,), {"direction": "adam", **_MERIT}),
    ((2,), {"direction": "adam", **_UNSCALED}),
]

OPTIMIZERS: dict[str, Build] = {
    "MERIT": MERIT,
    "MERIT without bound": lambda p: MERIT(p, weight_bound=False),
    "MERIT-W": lambda p: MERIT(p, element_wise=False),
    "MERIT stacked": lambda p: MERIT(p, matrix_dims=2, clip=None),
    "MERIT corrected": lambda p: MERIT(p, bias_correction=True, maximize=True),
    "MERIT with l2 norms": lambda p: MERIT(p, norm="l2"),
    "MERIT, norm clipped": lambda p: MERIT(p, max_grad_norm=0.1),
    "MERIT without ratios": lambda p: MERIT(p, ratio="none", bias_correction=True),
    "MERIT with bounded ratios": lambda p: MERIT(p, ratio_bounds=(0.2, 0.5)),
    "MaxLAMB": MaxLAMB,
    "LAMB": LAMB,
    "Lion": Lion,
    "MERIT, fused": lambda p: MERIT(p, fused=True),
    "MaxLAMB, fused": lambda p: MaxLAMB(p, fused=True),
    "MuonMERIT, fused": lambda p: MuonMERIT(
        [{"params": p[:-1], "direction": "muon"}, {"params": p[-1:], "direction": "adam"}], fused=True
    ),
    "NorMuon, fused": lambda p: NorMuon(
        [{"params": p[:-1], "direction": "muon"}, {"params": p[-1:], "direction": "adam"}], fused=True
    ),
    "NorMuonSphere, fused": lambda p: NorMuonSphere(
        [
            {"params": p[:1], "kind": "hidden", "split": [3, 2]},
            {"params": p[1:-1], "kind": "hidden", "matrix_dims": 2},
            {"params": p[-1:], "kind": "vector"},
        ],
        fused=True,
    ),
    "split, fused": lambda p: MuonMERIT(
        [
            {"params": p[:1], "direction": "muon", "split": 3},
            {"params": p[1:2], "direction": "muon", "split": [4, 1, 7], "split_dim": 0},
            {"params": p[2:3], "direction": "muon", "split": [1, 5], "matrix_dims": 2, "neuron_beta": None},
            {"params": p[3:4], "direction": "adam", "split": (3, 5), **_MERIT},
        ],
        fused=True,
    ),
    "every fourth MuonMERIT": lambda p: MuonMERIT(
        [{"params": some, "direction": "adam"} for some in (p[0::4], p[1::4], p[2::4])]
        + [{"params": p[3::4], "direction": "muon"}]
    ),
    **OF_MATRICES,
    **BY_ROWS,
    "mixed": lambda p: MuonMERIT(
        [{"params": [one], **options} for one, (_, options) in zip(p, MIXED, strict=True)]
    ),
}
# Their sums are added in another order.
WITHIN_TOLERANCE = {"LAMB", "MERIT with l2 norms", "MERIT, norm clipped", "OrScale", "OrScale stacked"}
WITHIN_TOLERANCE |= {"MuonSphere", "MuonSphere stacked"}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, known to every rank, with the placements of a parameter."""
    if not isinstance(like, DTensor):
        return full.clone()
    return distribute_tensor(full.clone(), like.device_mesh, like.placements, src_data_rank=None)


def whole(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def same(name: str, actual: Tensor, expected: Tensor) -> bool:
    """Whether this rank's part of a tensor equals that of a whole one."""
    if actual.shape != expected.shape:
        return False
    actual_part, expected_part = (
        x.to_local() if isinstance(x, DTensor) else x
        for x in (actual.detach(), placed(expected.detach(), actual))
    )
    if name in WITHIN_TOLERANCE:
        return torch.allclose(actual_part, expected_part, rtol=1e-5, atol=1e-6)
    return torch.equal(actual_part, expected_part)


def set_gradients(params: list[Tensor], shapes: list[tuple[int, ...]], step: int) -> None:
    """The gradients of a step, the same on every rank and in every layout."""
    for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
        param.grad = placed(values(shape, 1000 * step + i, param.dtype), param)


Change = Callable[[int, list[Tensor]], None]


def compare(
    name: str,
    params: list[Tensor],
    fulls: list[Tensor],
    change: Change | None = None,
    num_steps: int | None = None,
) -> list[str]:
    """Take steps with the sharded parameters and with the whole ones; return what differs afterwards.

    ``change`` gets the step, and may change either list of parameters as a user would.
    """
    if num_steps is None:
        num_steps = NUM_MATRIX_STEPS if name in OF_MATRICES or name == "mixed" else NUM_STEPS
    shapes = [tuple(full.shape) for full in fulls]
    expected = one_process(name, fulls, change, num_steps)
    optimizer = take_steps(name, params, shapes, change, num_steps)
    wrong = []
    for i, (param, (full, states)) in enumerate(zip(params, expected, strict=True)):
        if not same(name, param, full):
            wrong.append(f"weight {i} {shapes[i]}")
        if optimizer.state[param].keys() != states.keys():
            wrong.append(f"state {i} {shapes[i]}")
        for key, actual in optimizer.state[param].items():
            if actual.dtype != states[key].dtype or not same(name, actual, states[key]):
                wrong.append(f"{key} {i} {shapes[i]}")
    return wrong


def take_steps(
    name: str, params: list[Tensor], shapes: list[tuple[int, ...]], change: Change | None, num_steps: int
) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[name](params)
    for step in range(num_steps):
        set_gradients(params, shapes, step)
        if change is not None:
            change(step, params)
        optimizer.step()
    return optimizer


Expected = list[tuple[Tensor, dict[str, Tensor]]]
_known: dict[Any, Expected] = {}


def one_process(name: str, fulls: list[Tensor], change: Change | None, num_steps: int) -> Expected:
    """The weights and state of whole parameters, computed by the first rank, once for all layouts."""
    bits = tuple(
        (full.shape, full.dtype, full.flatten().view(torch.uint8).numpy().tobytes()) for full in fulls
    )
    key = name, num_steps, bits
    if change is None and key in _known:
        return _known[key]
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        params: list[Tensor] = [full.clone().requires_grad_() for full in fulls]
        optimizer = take_steps(name, params, [tuple(full.shape) for full in fulls], change, num_steps)
        answer = [[(param.detach(), optimizer.state[param]) for param in params]]
    dist.broadcast_object_list(answer)
    expected: Expected = answer[0]
    if change is None:
        _known[key] = expected
    return expected


def report(compared: dict[str, list[str]]) -> None:
    """Print all comparisons and their differences on the first rank; then exit together."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, compared)
    if dist.get_rank() == 0:
        merged = {case: sorted({w for one in everywhere for w in one[case]}) for case in compared}
        print("RESULT " + json.dumps(merged), flush=True)
    dist.barrier()  # no rank exits while another still receives
    dist.destroy_process_group()
