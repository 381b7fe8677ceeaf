"""The contestants of a step: what they are made of, and that each steps every weight."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from merit_lab.bench import newton_schulz
from merit_lab.bench.contestants import Contestant, Together, dion_muon, on_cpu, on_cuda
from merit_lab.bench.shapes import Parameters, Weight

WEIGHTS = [
    Weight((8, 4), "embedding"),
    Weight((4, 4), "hidden"),
    Weight((4,), "vector"),
    Weight((4, 8), "hidden"),
    Weight((8, 4), "head"),
]
CPU = torch.device("cpu")

# As much of dion as the benchmark uses: what it was given can be seen.
FAKE_DION = """
class Muon:
    def __init__(self, groups, **options):
        self.param_groups, self.options = groups, options
"""


def named(contestants: list[Contestant], name: str) -> Contestant:
    return next(own for own in contestants if own.name == name)


@pytest.mark.parametrize(
    "name", [own.name for own in on_cpu() if own.missing is None and "dion" not in own.name]
)
def test_each_contestant_steps_every_weight(name) -> None:
    params = Parameters.of(WEIGHTS, CPU)
    before = [own.detach().clone() for own in params.all]
    optimizer = named(on_cpu(), name).make(params)
    for _ in range(2):  # SOAP's first step finds its bases and changes nothing
        optimizer.step()
    assert all(not torch.equal(now, old) for now, old in zip(params.all, before, strict=True))


@pytest.mark.parametrize("contestants", [on_cpu, on_cuda])
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
def test_weights_take_the_direction_of_their_kind(contestants, name, direction, shapes) -> None:
    contestant = named(contestants(), name)
    found = [
        tuple(param.shape)
        for group in contestant.make(Parameters.of(WEIGHTS, CPU)).param_groups
        for param in group["params"]
        if group["direction"] == direction
    ]
    assert (contestant.direction, found) == (direction, shapes)


@pytest.mark.parametrize(("contestants", "fused"), [(on_cpu, None), (on_cuda, True)])
def test_torchs_muon_has_adamw_beside_it(contestants, fused) -> None:
    params = Parameters.of(WEIGHTS, CPU)
    both = named(contestants(), "torch Muon + AdamW").make(params)
    assert isinstance(both, Together)
    muon, adamw = both.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [tuple(own.shape) for own in muon.param_groups[0]["params"]] == [(4, 4), (4, 8)]
    assert [tuple(own.shape) for own in adamw.param_groups[0]["params"]] == [(8, 4), (4,), (8, 4)]
    assert (adamw.defaults["fused"], adamw.defaults["foreach"]) == (fused, None if fused else True)
    assert both.param_groups == [*muon.param_groups, *adamw.param_groups]


@pytest.mark.parametrize(("contestants", "use_triton"), [(on_cpu, False), (on_cuda, True)])
def test_dions_muon_is_built_as_its_readme_says(contestants, use_triton, tmp_path, monkeypatch) -> None:
    Path(tmp_path / "dion.py").write_text(FAKE_DION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dion", raising=False)
    contestant = named(contestants(), "dion Muon + AdamW")
    assert contestant.missing is None
    assert contestant.left_out(WEIGHTS) is None
    params = Parameters.of(WEIGHTS, CPU)
    made = contestant.make(params)
    monkeypatch.delitem(sys.modules, "dion")
    assert vars(made)["options"] == {"use_triton": use_triton}
    hidden, rest = made.param_groups
    assert hidden == {"params": params.hidden}
    assert rest == {"params": params.rest, "algorithm": "adamw"}


def test_another_package_by_the_name_of_dion_is_no_muon(tmp_path, monkeypatch) -> None:
    Path(tmp_path / "dion.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dion", raising=False)
    with pytest.raises(AttributeError, match="'dion' has no attribute 'Muon'"):
        dion_muon(Parameters.of(WEIGHTS, CPU), use_triton=False)
    monkeypatch.delitem(sys.modules, "dion")


def test_on_a_gpu_our_muons_are_also_replayed_and_soap_is_timed_by_cycles() -> None:
    contestants = on_cuda()
    assert {"Muon", "NorMuon", "MuonMERIT"} <= {own.name for own in contestants if own.graph}
    assert {own.name: own.cycle for own in contestants if own.cycle > 1} == {"SOAP": 10, "SOAPMERIT": 10}
    assert len({own.name for own in contestants}) == len(contestants)


def test_newton_schulz_is_timed_for_hidden_matrices_alone(monkeypatch) -> None:
    """In stacks of one shape, by what was made for each stack."""
    weights, seen = [*WEIGHTS, Weight((4, 4), "hidden")], []

    def make(stack: torch.Tensor) -> Callable[[torch.Tensor], object]:
        return lambda given: seen.append((given is stack, tuple(given.shape), given.dtype))

    monkeypatch.setattr(newton_schulz, "orthogonaliser", make)
    params = Parameters.of(weights, CPU)
    found = newton_schulz.measure_newton_schulz(params, "small", 0, matrix_tflop_s=2.0)
    assert seen[:2] == [(True, (2, 4, 4), torch.bfloat16), (True, (1, 4, 8), torch.bfloat16)]
    # 4 x 4 has 384 operations a pass, 4 x 8 has 640.
    assert (found.num_matrices, found.num_flops) == (3, 5 * (2 * 384 + 640))
    assert found.share == found.tflop_s / 2


def test_newton_schulz_is_timed_on_gradients_each_time(monkeypatch) -> None:
    """A step overwrites what it is given."""
    params, seen = Parameters.of(WEIGHTS, CPU), []

    def make(stack: torch.Tensor) -> Callable[[torch.Tensor], object]:
        del stack

        def run(given: torch.Tensor) -> None:
            seen.append(given.clone())
            given.zero_()

        return run

    monkeypatch.setattr(newton_schulz, "orthogonaliser", make)
    newton_schulz.measure_newton_schulz(params, "small", 0, matrix_tflop_s=2.0)
    grads = [matrix.grad.bfloat16() for matrix in params.hidden]
    assert len(seen) > 2 * len(grads)
    assert all(any(torch.equal(own[0], grad) for grad in grads) for own in seen)


def test_what_is_timed_as_newton_schulz_finds_the_polar_factor_of_each_matrix(monkeypatch) -> None:
    found, polar = [], newton_schulz.polar
    monkeypatch.setattr(newton_schulz, "polar", lambda *arguments: found.append(polar(*arguments)))
    matrix = torch.tensor([1.0, 0.3, 0.1, 0.03]).diag()[:, [0, 1, 2, 3, 3, 3]]
    stack = torch.stack([matrix, 3 * matrix.flip(0)])
    newton_schulz.orthogonaliser(stack)(stack)
    assert [tuple(own.shape) for own in found] == [(1, 4, 6)] * 2
    for own in found:
        values = torch.linalg.svdvals(own.float())
        assert values.min() > 0.6
        assert values.max() < 1.3
