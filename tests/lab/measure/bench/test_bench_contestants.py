"""The contestants of the benchmark: how they are built, and that each one updates every weight."""

import pytest
import torch

from merit_lab.measure.bench.contestants import BenchContestant, contestants
from merit_lab.measure.bench.model import Parameters, WeightSpec

WEIGHTS = [
    WeightSpec((8, 4), "embedding"),
    WeightSpec((4, 4), "hidden"),
    WeightSpec((4,), "vector"),
    WeightSpec((4, 8), "hidden"),
    WeightSpec((8, 4), "head"),
]
CPU = torch.device("cpu")
ON_CPU, ON_GPU = (contestants(on_gpu=on_gpu) for on_gpu in (False, True))


def named(all_of_them: list[BenchContestant], name: str) -> BenchContestant:
    return next(contestant for contestant in all_of_them if contestant.name == name)


@pytest.mark.parametrize(
    "name",
    [one.name for one in ON_CPU if one.package in (None, "pytorch_optimizer")],
)
def test_each_contestant_updates_every_weight(name) -> None:
    if (reason := named(ON_CPU, name).left_out(WEIGHTS)) is not None:
        pytest.skip(reason)
    params = Parameters.of(WEIGHTS, CPU)
    before = [param.detach().clone() for param in params.all]
    optimizer = named(ON_CPU, name).make(params)
    for _ in range(2):  # SOAP's first step only computes its bases
        optimizer.step()
    assert all(not torch.equal(now, old) for now, old in zip(params.all, before, strict=True))


@pytest.mark.parametrize("all_of_them", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("name", "direction", "shapes"),
    [
        ("Muon", "muon", [(4, 4), (4, 8)]),
        ("NorMuon", "muon", [(4, 4), (4, 8)]),
        ("MuonMERIT", "muon", [(4, 4), (4, 8)]),
        ("SOAPMERIT", "soap", [(4, 4), (4, 8)]),
        ("SOAP", "soap", [(8, 4), (4, 4), (4, 8), (8, 4)]),  # it rotates embeddings and heads too
    ],
)
def test_weights_get_the_direction_of_their_kind(all_of_them, name, direction, shapes) -> None:
    contestant = named(all_of_them, name)
    found = [
        tuple(param.shape)
        for group in contestant.make(Parameters.of(WEIGHTS, CPU)).param_groups
        for param in group["params"]
        if group["direction"] == direction
    ]
    assert (contestant.direction, found) == (direction, shapes)
