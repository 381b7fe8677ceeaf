"""The contestants of the benchmark: how they are built, and that each one updates every weight."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from merit_lab.measure.bench import newton_schulz
from merit_lab.measure.bench.contestants import BenchContestant, Together, dion_muon, on_cpu, on_cuda
from merit_lab.measure.bench.shapes import Parameters, WeightSpec

WEIGHTS = [
    WeightSpec((8, 4), "embedding"),
    WeightSpec((4, 4), "hidden"),
    WeightSpec((4,), "vector"),
    WeightSpec((4, 8), "hidden"),
    WeightSpec((8, 4), "head"),
]
CPU = torch.device("cpu")

# The part of dion that the benchmark uses. It keeps its arguments.
FAKE_DION = """
class Muon:
    def __init__(self, groups, **options):
        self.param_groups, self.options = groups, options
"""


def named(contestants: list[BenchContestant], name: str) -> BenchContestant:
    return next(contestant for contestant in contestants if contestant.name == name)


@pytest.mark.parametrize(
    "name", [one.name for one in on_cpu() if one.missing is None and "dion" not in one.name]
)
def test_each_contestant_updates_every_weight(name) -> None:
    params = Parameters.of(WEIGHTS, CPU)
    before = [param.detach().clone() for param in params.all]
    optimizer = named(on_cpu(), name).make(params)
    for _ in range(2):  # SOAP's first step only computes its bases
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
def test_weights_get_the_direction_of_their_kind(contestants, name, direction, shapes) -> None:
    contestant = named(contestants(), name)
    found = [
        tuple(param.shape)
        for group in contestant.make(Parameters.of(WEIGHTS, CPU)).param_groups
        for param in group["params"]
        if group["direction"] == direction
    ]
    assert (contestant.direction, found) == (direction, shapes)


@pytest.mark.parametrize(("contestants", "fused"), [(on_cpu, None), (on_cuda, True)])
def test_torchs_muon_has_adamw_for_the_rest(contestants, fused) -> None:
    params = Parameters.of(WEIGHTS, CPU)
    both = named(contestants(), "torch Muon + AdamW").make(params)
    assert isinstance(both, Together)
    muon, adamw = both.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [tuple(param.shape) for param in muon.param_groups[0]["params"]] == [(4, 4), (4, 8)]
    assert [tuple(param.shape) for param in adamw.param_groups[0]["params"]] == [(8, 4), (4,), (8, 4)]
    assert (adamw.defaults["fused"], adamw.defaults["foreach"]) == (fused, None if fused else True)
    assert both.param_groups == [*muon.param_groups, *adamw.param_groups]


@pytest.mark.parametrize(("contestants", "use_triton"), [(on_cpu, False), (on_cuda, True)])
def test_dions_muon_is_built_as_in_its_readme(contestants, use_triton, tmp_path, monkeypatch) -> None:
    Path(tmp_path / "dion.py").write_text(FAKE_DION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dion", raising=False)
    contestant = named(contestants(), "dion Muon + AdamW")
    assert contestant.missing is None
    assert contestant.left_out(WEIGHTS) is None
    params = Parameters.of(WEIGHTS, CPU)
    optimizer = contestant.make(params)
    monkeypatch.delitem(sys.modules, "dion")
    assert vars(optimizer)["options"] == {"use_triton": use_triton}
    hidden, rest = optimizer.param_groups
    assert hidden == {"params": params.hidden}
    assert rest == {"params": params.rest, "algorithm": "adamw"}


def test_another_package_named_dion_is_an_error(tmp_path, monkeypatch) -> None:
    Path(tmp_path / "dion.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dion", raising=False)
    with pytest.raises(AttributeError, match="'dion' has no attribute 'Muon'"):
        dion_muon(Parameters.of(WEIGHTS, CPU), use_triton=False)
    monkeypatch.delitem(sys.modules, "dion")


def test_on_a_gpu_muons_are_timed_in_graphs_and_soap_in_cycles() -> None:
    contestants = on_cuda()
    assert {"Muon", "NorMuon", "MuonMERIT"} <= {one.name for one in contestants if one.graph}
    assert {one.name: one.cycle for one in contestants if one.cycle > 1} == {"SOAP": 10, "SOAPMERIT": 10}
    assert len({one.name for one in contestants}) == len(contestants)


def test_newton_schulz_is_timed_for_hidden_matrices_only(monkeypatch) -> None:
    """In stacks of one shape, each with its own orthogonaliser."""
    weights, seen = [*WEIGHTS, WeightSpec((4, 4), "hidden")], []

    def make(stack: torch.Tensor) -> Callable[[torch.Tensor], object]:
        return lambda matrices: seen.append((matrices is stack, tuple(matrices.shape), matrices.dtype))

    monkeypatch.setattr(newton_schulz, "orthogonaliser", make)
    params = Parameters.of(weights, CPU)
    found = newton_schulz.measure_newton_schulz(params, "small", 0, matrix_tflop_s=2.0)
    assert seen[:2] == [(True, (2, 4, 4), torch.bfloat16), (True, (1, 4, 8), torch.bfloat16)]
    # 4 x 4 has 384 operations a pass, 4 x 8 has 640.
    assert (found.num_matrices, found.num_flops) == (3, 5 * (2 * 384 + 640))
    assert found.share == found.tflop_s / 2


def test_newton_schulz_is_timed_on_gradients_each_time(monkeypatch) -> None:
    """A step overwrites its input."""
    params, seen = Parameters.of(WEIGHTS, CPU), []

    def make(stack: torch.Tensor) -> Callable[[torch.Tensor], object]:
        del stack

        def run(matrices: torch.Tensor) -> None:
            seen.append(matrices.clone())
            matrices.zero_()

        return run

    monkeypatch.setattr(newton_schulz, "orthogonaliser", make)
    newton_schulz.measure_newton_schulz(params, "small", 0, matrix_tflop_s=2.0)
    grads = [matrix.grad.bfloat16() for matrix in params.hidden]
    assert len(seen) > 2 * len(grads)
    assert all(any(torch.equal(stack[0], grad) for grad in grads) for stack in seen)


def test_the_timed_newton_schulz_computes_the_polar_factor_of_each_matrix(monkeypatch) -> None:
    factors, polar = [], newton_schulz.polar
    monkeypatch.setattr(newton_schulz, "polar", lambda *arguments: factors.append(polar(*arguments)))
    matrix = torch.tensor([1.0, 0.3, 0.1, 0.03]).diag()[:, [0, 1, 2, 3, 3, 3]]
    stack = torch.stack([matrix, 3 * matrix.flip(0)])
    newton_schulz.orthogonaliser(stack)(stack)
    assert [tuple(factor.shape) for factor in factors] == [(1, 4, 6)] * 2
    for factor in factors:
        values = torch.linalg.svdvals(factor.float())
        assert values.min() > 0.6
        assert values.max() < 1.3
