"""The contestants of the benchmark: how they are built, and that each one updates every weight."""

import sys
from pathlib import Path

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

# The part of dion that the benchmark uses. It keeps its arguments.
FAKE_DION = """
class Muon:
    def __init__(self, groups, **options):
        self.param_groups, self.options = groups, options
"""


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


@pytest.mark.parametrize(("all_of_them", "use_triton"), [(ON_CPU, False), (ON_GPU, True)], ids=["cpu", "gpu"])
def test_dions_muon_is_built_as_in_its_readme(all_of_them, use_triton, tmp_path, monkeypatch) -> None:
    Path(tmp_path / "dion.py").write_text(FAKE_DION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dion", raising=False)
    contestant = named(all_of_them, "dion Muon + AdamW")
    assert contestant.left_out(WEIGHTS) is None
    params = Parameters.of(WEIGHTS, CPU)
    optimizer = contestant.make(params)
    monkeypatch.delitem(sys.modules, "dion")
    assert vars(optimizer)["options"] == {"use_triton": use_triton}
    hidden, rest = optimizer.param_groups
    assert hidden == {"params": params.hidden}
    assert rest == {"params": params.rest, "algorithm": "adamw"}
