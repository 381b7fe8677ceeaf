"""Muon's direction on the fused engine against the eager one: every option, and changes between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from optimizer_cases import (
    Hidden,
    assert_same_bits,
    assert_unchanged,
    default_dtype,
    name_of,
    random_tensor,
    snapshot,
)
from torch import Tensor, nn

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

from fused_cases import ULPS, Pair, assert_within_ulps, gradient, parameters, tiles

from merit_optim import Muon, MuonMERIT, MuonSphere, NorMuon, NorMuonSphere
from merit_optim.optim import algorithm
from merit_optim.optim.axes.ratios import Merit
from merit_optim.optim.axes.ratios.ratio import sizes
from merit_optim.optim.engines.fused import engine, launch, refusals
from merit_optim.optim.engines.fused.engine import FusedEngine
from merit_optim.optim.engines.fused.launch import HeldLaunch
from merit_optim.optim.engines.part import Whole
from merit_optim.optim.engines.work import Control
from merit_optim.optim.family import Family
from merit_optim.optim.matrices import Extent
from merit_optim.optim.spec import Spec

# NumPy's warnings about NaN and infinities; Triton's interpreter uses NumPy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning"),
    pytest.mark.usefixtures("memory_begins_as_nan"),
]

INTERPRETED = not torch.cuda.is_available()

muon_merit = Hidden(MuonMERIT, neuron_beta=None, ratio_bounds=None)
muon, normuon, sphere, norsphere = map(Hidden, (Muon, NorMuon, MuonSphere, NorMuonSphere))

# Relative to the change of a weight, in norms: products in bfloat16 round differently in each engine.
SHARE = 0.1
NEURON_SHARE = 1e-5 if INTERPRETED else SHARE  # of the mean squares of outputs


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, which truncates to bfloat16. The tensor cores of a GPU need bfloat16."""
    if INTERPRETED:
        monkeypatch.setattr(launch, "HELD_DTYPE", torch.float32)


class MuonPair(Pair):
    """Like ``Pair``; in the interpreter both have products in float32, on a GPU the tolerance is ``SHARE``.

    Two passes by default, because each is slow in the interpreter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        build: Hidden = muon_merit,
        groups: Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        def built(params: Any, *, fused: bool, **options: Any) -> Family:
            exact = {"ns_dtype": "float32"} if INTERPRETED and not fused else {}
            return build(params, fused=fused, **{"lr": 0.05, "ns_steps": 2, **options, **exact})

        super().__init__(params, built, groups, **options)
        self.before: list[Tensor] = []

    def step(self, grads: Sequence[Tensor | None] | None = None) -> None:
        self.before = [p.detach().clone() for p in self.params]
        super().step(grads)

    def compare(self) -> None:
        for param, eager_param, before in zip(self.params, self.eager_params, self.before, strict=True):
            if param.ndim < 2:
                continue
            if not INTERPRETED:
                apart, change = size(param - eager_param), size(eager_param - before)
                assert apart <= SHARE * change + torch.finfo(param.dtype).eps * size(before)
                eager_param.data.copy_(param.data)
            self.compare_neurons(param, eager_param)
        super().compare()

    def compare_neurons(self, param: Tensor, eager_param: Tensor) -> None:
        """The mean squares of a polar factor's rows, where the direction has them."""
        states = (self.fused.state[param], self.eager.state[eager_param])
        neurons, eager_neurons = (state.get("second_momentum_buffer") for state in states)
        if neurons is not None:
            assert size(neurons - eager_neurons) <= NEURON_SHARE * size(eager_neurons)
            eager_neurons.copy_(neurons)

    def change(self, **options: Any) -> None:
        """Change options of the first group of both."""
        for optimizer in (self.fused, self.eager):
            optimizer.param_groups[0].update(options)


def size(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach().double())


def held_launches(engine: FusedEngine) -> list[HeldLaunch]:
    return [launch for launch in engine._launches if isinstance(launch, HeldLaunch)]


SHAPES = {
    "wide": (9, 37),
    "tall": (37, 9),
    "square": (16, 16),
    "aligned": (3, 32),
    "one row": (1, 20),
    "one column": (20, 1),
    "one element": (1, 1),
    "four dimensions": (3, 2, 5, 3),
}


@pytest.mark.usefixtures("chunks_as_on_a_gpu")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(device, shape) -> None:
    pair = MuonPair(parameters([shape], device))
    with tiles():
        pair.step()
    assert not pair.engine._unfused
    assert len(held_launches(pair.engine)) == 1


def test_all_shapes_and_vectors_share_a_step(device) -> None:
    """Two of one shape share a launch; embeddings and vectors have Adam's direction."""
    shapes = [(9, 17), (20,), (5, 4), (), (9, 17), (0, 5), (3, 0)]
    pair = MuonPair(parameters(shapes, device))
    with tiles():
        for _ in range(2):
            pair.step()
    sizes = [(len(launch.weights), launch.shape) for launch in held_launches(pair.engine)]
    assert sizes == [(2, (2, 9, 17)), (1, (1, 5, 4))]
    assert [pair.fused.state[p]["step"].item() for p in pair.params] == [2] * len(shapes)


OPTIONS: list[tuple[Hidden, dict[str, Any]]] = [
    (muon_merit, {}),
    (muon_merit, {"nesterov": False}),
    (muon_merit, {"momentum": 0.5}),
    (muon_merit, {"momentum": 0.0, "nesterov": False}),
    (muon_merit, {"weight_decay": 0.0}),
    (muon_merit, {"weight_decay": 3.0}),
    (muon_merit, {"maximize": True}),
    (muon_merit, {"clip": None}),
    (muon_merit, {"clip": 0.3}),
    (muon_merit, {"element_wise": False}),
    (muon_merit, {"weight_bound": False}),
    (muon_merit, {"ratio_bounds": (0.0, 0.05)}),
    (muon_merit, {"norm": "l2", "element_wise": False}),
    (muon_merit, {"max_grad_norm": 0.5, "momentum": 0.9}),
    (muon_merit, {"nonfinite": "skip", "capturable": True, "lr": 0.04}),
    (muon_merit, {"ns_steps": 5, "ns_coefficients": "polar-express"}),
    (muon_merit, {"ns_steps": 3, "ns_coefficients": [[2.0, -1.5, 0.5], [1.5, -0.5, 0.0]]}),
    *((muon, {"scale": scale}) for scale in ("match_rms_adamw", "original", "rms", "spectral")),
    (muon_merit, {"neuron_beta": 0.9}),
    (muon_merit, {"neuron_beta": 0.0, "element_wise": False, "norm": "l2"}),
    (normuon, {}),
    (normuon, {"neuron_beta": 0.5, "scale": "original"}),
    (normuon, {"nonfinite": "skip", "capturable": True, "lr": 0.04}),
    (muon, {"hold": "decoupled", "weight_decay": 0.5}),
    (muon, {"hold": "corrected", "weight_decay": 0.5, "peak_lr": 0.1}),
    (muon, {"hold": "cautious", "weight_decay": 0.5, "clip": 0.3}),
    (muon_merit, {"hold": "ball", "radius": 3.0}),
    (sphere, {}),
    (sphere, {"gain": 1.4, "nonfinite": "skip", "capturable": True, "lr": 0.04}),
    (norsphere, {"lr": 0.3}),
]


@pytest.mark.parametrize(("build", "options"), OPTIONS, ids=name_of)
def test_every_option(device, build, options) -> None:
    pair = MuonPair(parameters([(9, 5)], device), build, **options)
    for _ in range(2):
        pair.step()
    assert not pair.engine._unfused


SPLIT_BY_ROWS: list[tuple[tuple[int, ...], Any, Hidden, dict[str, Any]]] = [
    ((9, 5), 3, muon_merit, {}),
    ((9, 5), 3, normuon, {}),
    ((12, 5), [6, 3, 3], muon_merit, {"neuron_beta": 0.9}),
    ((12, 16), [6, 3, 3], muon, {"scale": "original", "nesterov": False}),
    ((3, 8, 5), [2, 6], muon_merit, {"neuron_beta": 0.9, "matrix_dims": 2}),
    ((6, 2, 3), 2, muon_merit, {"norm": "l2", "element_wise": False}),
    ((9, 4), (1, 8), muon_merit, {"neuron_beta": 0.9, "nonfinite": "skip", "split_dim": 0}),
    ((3, 8, 21), [2, 6], norsphere, {"matrix_dims": 2}),
]


@pytest.mark.parametrize(("shape", "split", "build", "options"), SPLIT_BY_ROWS, ids=name_of)
@pytest.mark.slow
def test_weights_that_are_split_by_rows(device, shape, split, build, options) -> None:
    """Matrices of one size share a launch, whichever weight they are of; steps are counted once."""
    pair = MuonPair(parameters([shape, shape], device), build, split=split, **options)
    with tiles():
        for _ in range(2):
            pair.step()
    assert not pair.engine._unfused
    assert [pair.fused.state[param]["step"].item() for param in pair.params] == [2, 2]
    heights = {launch.shape[1] for launch in held_launches(pair.engine)}
    assert heights == ({shape[0] // split} if isinstance(split, int) else set(split))


def test_a_split_weight_is_the_weights_it_is_split_into(device) -> None:
    """Bit for bit, with ratios and equal rows."""
    whole, *parts = parameters([(12, 5), (6, 5), (3, 5), (3, 5)], device)
    whole.data.copy_(torch.cat([part.data for part in parts]))
    split, apart = (
        muon_merit([{"params": params, **options}], fused=True, neuron_beta=0.9, ns_steps=2)
        for params, options in (([whole], {"split": [6, 3, 3]}), (parts, {}))
    )
    for step in range(2):
        whole.grad = gradient(whole, step)
        for part, grad in zip(parts, whole.grad.split([6, 3, 3]), strict=True):
            part.grad = grad.clone()
        split.step()
        apart.step()
    assert_same_bits(whole.detach(), torch.cat(parts).detach())
    averages = [apart.state[part]["second_momentum_buffer"] for part in parts]
    assert_same_bits(split.state[whole]["second_momentum_buffer"], torch.cat(averages, 1))


def test_the_options_make_a_difference_here() -> None:
    """Otherwise the test above would prove nothing. The gradient norm makes a difference in the momentum."""
    results: list[list[Tensor]] = []
    for build, options in OPTIONS:
        (param,) = parameters([(9, 5)], "cpu")
        optimizer = build([param], fused=False, **{"lr": 0.05, "ns_steps": 2, **options})
        for step in range(2):
            param.grad = gradient(param, 100 * step)
            optimizer.step()
        result = [param.detach(), optimizer.state[param]["momentum_buffer"]]
        for other in results:
            assert any((x - y).abs().amax() > 1e-4 for x, y in zip(result, other, strict=True)), options
        results.append(result)


# --- dtypes -----------------------------------------------------------------------------------------------


DTYPES = [
    (torch.float32, torch.float32, torch.bfloat16, True),
    (torch.float32, torch.float32, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float32, torch.float32, True),
]


@pytest.mark.parametrize(("param_dtype", "grad_dtype", "state_dtype", "nesterov"), DTYPES, ids=str)
def test_every_mix_of_dtypes_is_computed_in_float32(
    device, param_dtype, grad_dtype, state_dtype, nesterov
) -> None:
    """And stored in its dtype, rounded once: towards zero in the interpreter, to nearest on a GPU.

    The expected weight is computed from the momentum as stored.
    """
    (param,) = parameters([(9, 5)], device, param_dtype)
    optimizer = muon_merit(
        [param], lr=0.05, ns_steps=2, nesterov=nesterov, state_dtype=state_dtype, fused=True
    )
    momentum_before = torch.zeros_like(param, dtype=torch.float32)
    param.grad_dtype = None
    for step in range(2):
        param.grad = gradient(param, step, grad_dtype)
        before = param.detach().float().clone()
        optimizer.step()
        momentum = optimizer.state[param]["momentum_buffer"]
        assert_rounded(momentum, torch.lerp(momentum_before, param.grad.float(), 1 - 0.9), state_dtype)
        momentum_before = momentum.float().clone()
        n = torch.lerp(param.grad.float(), momentum_before, 0.9) if nesterov else momentum_before
        expected = stepped(before, n, optimizer.param_groups[0])
        if INTERPRETED:
            assert_rounded(param.detach(), expected, param_dtype)
        else:
            rounding = torch.finfo(param_dtype).eps * size(before)
            assert size(param - expected) <= SHARE * size(expected - before) + rounding
    assert not next(iter(optimizer._engines.values()))._unfused


def stepped(weight: Tensor, n: Tensor, group: dict[str, Any]) -> Tensor:
    """A weight after a step by the definition, for a given N and with products in float32."""
    spec = Spec.of({**group, "ns_dtype": "float32"})
    direction, ratio = spec.direction, spec.ratio
    formed = direction.whole((n[None],), 1)
    d, _ = direction.after(formed, (n[None],), torch.float32, Extent.whole(*n.shape))
    update = spec.hold.inside(d, weight[None], group["weight_decay"])
    of_both = [sizes(x, ratio, is_vector=False) for x in (weight[None], update)]
    scale = ratio.scale(*algorithm.ratios_of(*of_both))
    return weight - ratio.clipped(scale * update)[0] * group["lr"]


def assert_rounded(actual: Tensor, value: Tensor, dtype: torch.dtype) -> None:
    """Check a float32 value, some ulps off, in another dtype: each element within one of its ulps."""
    assert actual.dtype == dtype
    ulp = 0 if dtype == torch.float32 else torch.finfo(dtype).eps * value.abs()
    assert ((actual.float() - value).abs() <= ulp + ULPS * torch.finfo(torch.float32).eps).all()


# --- matrices of one shape together -----------------------------------------------------------------------

STACKED = [(2, 5, 3), (5, 3), (2, 5, 3)]
"""Five matrices of 15 elements."""


def together(num: int) -> Any:
    """Limit launches to ``num`` of these matrices, with room for a part of one more."""
    return mock.patch.object(FusedEngine, "max_held", num * 15 + 14)


@pytest.mark.parametrize("build", [muon_merit, normuon], ids=name_of)
@pytest.mark.parametrize(("num", "chunks"), [(0, [1] * 5), (2, [2, 2, 1]), (4, [3, 2])])
@pytest.mark.slow
def test_matrices_of_one_shape_are_processed_in_chunks(device, num, chunks, build) -> None:
    """From one parameter or several; the step of a parameter with stacked matrices is counted once."""
    pair = MuonPair(parameters(STACKED, device), build, matrix_dims=2)
    with together(num):
        for _ in range(2):
            pair.step()
    assert [launch.shape for launch in held_launches(pair.engine)] == [(chunk, 5, 3) for chunk in chunks]
    assert [pair.fused.state[p]["step"].item() for p in pair.params] == [2, 2, 2]
    assert [pair.fused.state[p]["momentum_buffer"].shape for p in pair.params] == [
        p.shape for p in pair.params
    ]


@pytest.mark.parametrize("build", [muon_merit, normuon], ids=name_of)
@pytest.mark.slow
def test_chunks_change_no_bit(device, build) -> None:
    def run(num: int) -> tuple[list[Tensor], dict[str, Any]]:
        optimizer = build(parameters(STACKED, device), ns_steps=2, matrix_dims=2, fused=True)
        with together(num):
            for step in range(2):
                set_gradients(optimizer, step)
                optimizer.step()
        return snapshot(optimizer)

    whole = run(5)  # all of them
    for num in (2, 1):
        assert_same_bits(run(num), whole, f"{num} together")


def set_gradients(optimizer: Family, step: int = 0) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        param.grad = gradient(param, 100 * step + i)


def test_groups_that_differ_in_numbers_share_a_launch(device) -> None:
    groups = [
        {"params": slice(0, 2)},
        {"params": slice(2, 3), "lr": 0.2, "momentum": 0.5, "weight_decay": 1.0, "clip": 0.4},
        {"params": slice(3, 4), "scale": "spectral", "clip": None},
    ]
    pair = MuonPair(parameters([(5, 7), (6,), (5, 7), (5, 7)], device), groups=groups)
    for _ in range(2):
        pair.step()
    assert len(held_launches(pair.engine)) == 1


def test_groups_that_differ_in_compiled_options_have_separate_launches(device) -> None:
    groups: list[dict[str, Any]] = [
        {},
        {"nesterov": False},
        {"ns_steps": 1},
        {"ns_coefficients": "dion"},
        {"ns_eps": 2.0},
        {"maximize": True},
        {"ratio": "none"},
        {"element_wise": False, "norm": "l2"},
        {"weight_bound": False},
    ]
    pair = MuonPair(
        parameters([(5, 7)] * len(groups), device),
        groups=[{**group, "params": slice(i, i + 1)} for i, group in enumerate(groups)],
    )
    for _ in range(2):
        pair.step()
    assert len(held_launches(pair.engine)) == len(groups)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_gradient_affects_exactly_its_matrix(device, bad) -> None:
    def run(value: float | None) -> Tensor:
        (param,) = parameters([(3, 5, 7)], device)
        param.grad = gradient(param, 0)
        if value is not None:
            param.grad[1, 4, 0] = value
        with tiles():
            muon_merit([param], ns_steps=2, matrix_dims=2, fused=True).step()
        return param.detach()

    good, spoiled = run(None), run(bad)
    assert spoiled[1].isnan().all()
    assert_same_bits(spoiled[[0, 2]], good[[0, 2]])


# --- steps that are not taken -----------------------------------------------------------------------------


def test_a_bad_step_is_skipped_with_nonfinite_skip(device) -> None:
    pair = MuonPair(parameters([(5, 7), (7,)], device), nonfinite="skip")
    pair.step()
    before = snapshot(pair.fused)
    grads = [gradient(p, i) for i, p in enumerate(pair.params)]
    grads[0][3, 3] = torch.nan
    pair.step(grads)
    assert_unchanged(pair.fused, before)
    assert pair.fused.num_skipped_steps == 1
    pair.step()
    assert [pair.fused.state[p]["step"].item() for p in pair.params] == [2, 2]


@pytest.mark.parametrize("build", [muon_merit, muon, normuon], ids=name_of)
def test_the_device_can_skip_a_step(device, build) -> None:
    """The first step and a later one, with chunks that start inside a parameter."""
    optimizer = build(parameters([(3, 5, 3), (7,)], device), ns_steps=2, matrix_dims=2, fused=True)
    with together(2):
        for skip in (True, False, True):
            set_gradients(optimizer)
            works, before = optimizer._gather(), snapshot(optimizer)
            controls = {works[0].params[0].device: Control(skip=torch.tensor(skip, device=device))}
            optimizer._update(works, controls, None)
            if skip:
                assert_unchanged(optimizer, before)
            else:
                assert not any(map(torch.equal, snapshot(optimizer)[0], before[0]))


def test_the_step_unscales_and_skips_for_grad_scaler(device) -> None:
    pair = MuonPair(parameters([(5, 7), (7,)], device), max_grad_norm=5.0)
    assert pair.fused._step_supports_amp_scaling
    for optimizer in (pair.fused, pair.eager):
        optimizer.grad_scale = torch.tensor(3.0, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
    pair.step()
    momentum = pair.fused.state[pair.params[0]]["momentum_buffer"]
    torch.testing.assert_close(momentum, pair.params[0].grad / 3 * 0.1 * min(1, 5 / pair.fused.grad_norm))
    before = snapshot(pair.fused)
    for optimizer in (pair.fused, pair.eager):
        optimizer.found_inf = torch.tensor(1.0, device=device)
    pair.step()
    assert_unchanged(pair.fused, before)


def test_parameters_without_a_gradient_stay_as_they_are(device) -> None:
    """Different ones each time, in the same or another number."""
    pair = MuonPair(parameters([(5, 7), (5, 7), (5,), (4, 3)], device))
    num_steps = [0] * 4
    for present in ((0, 2), (1, 2), (0, 1, 3), (), (3,)):
        before = [p.detach().clone() for p in pair.params]
        grads = [gradient(p, pair.num_steps) if i in present else None for i, p in enumerate(pair.params)]
        pair.step(grads)
        for i, param in enumerate(pair.params):
            assert torch.equal(param, before[i]) == (i not in present)
            num_steps[i] += i in present
            assert pair.fused.state[param].get("step", 0) == num_steps[i]


# --- what changes between steps ---------------------------------------------------------------------------


def test_numbers_change_and_the_launches_stay(device) -> None:
    """Including a schedule of the momentum."""
    pair = MuonPair(parameters([(9, 5), (6,)], device))
    pair.step()
    launches = list(pair.engine._launches)
    for change in ({"momentum": 0.5}, {"lr": 0.1}, {"weight_decay": 2.0}, {"clip": 0.1}, {"clip": None}):
        pair.change(**change)
        pair.step()
    assert all(now is before for now, before in zip(pair.engine._launches, launches, strict=True))


def test_compiled_options_may_change_too(device) -> None:
    pair = MuonPair(parameters([(9, 5)], device))
    pair.step()
    for change in (
        {"nesterov": False},
        {"ns_steps": 1},
        {"ns_coefficients": "dion"},
        {"scale": "spectral"},
        {"ns_eps": 2.0},
        {"maximize": True},
        {"ratio": "none"},
        {"norm": "l2", "element_wise": False},
        {"norm": "max", "element_wise": True, "weight_bound": False},
    ):
        pair.change(**change)
        pair.step()
        assert not pair.engine._unfused


def test_a_transposed_weight_has_the_scale_of_its_outputs(device) -> None:
    # split_dim is given, because its default depends on transposed and would change the tables too.
    pair = MuonPair(parameters([(5, 9)], device), muon, scale="original", split_dim=0)
    for transposed in (True, False):
        pair.change(transposed=transposed)
        pair.step()
        assert not pair.engine._unfused


def test_normuon_equalizes_rows_or_columns(device) -> None:
    """Weights of one shape whose outputs are rows, columns and, without it, neither."""
    groups = [
        {"params": slice(0, 1), "transposed": True},
        {"params": slice(1, 2), "neuron_beta": None},
        {"params": slice(2, 4)},
    ]
    pair = MuonPair(parameters([(5, 9)] * 4, device), normuon, groups=groups)
    for _ in range(2):
        pair.step()
    assert [len(launch.weights) for launch in held_launches(pair.engine)] == [1, 1, 2]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 9), (9, 1), (1100, 2), (2, 1100), (3, 33, 70), (2, 70, 33)],
    ids=str,
)
@pytest.mark.slow
def test_outputs_of_every_shape_are_equalized(device, shape, transposed) -> None:
    """More of them, and more inputs, than a program takes at a time, in stacked matrices too."""
    options = {"matrix_dims": 2, "transposed": transposed}
    pair = MuonPair(parameters([shape, shape], device), normuon, groups=[{"params": slice(0, 2), **options}])
    for _ in range(2):
        pair.step()
    assert not pair.engine._unfused


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("shape", "changed"),
    [((4, 6, 8), {"matrix_dims": 2}), ((6, 8), {"transposed": True}), ((1, 8), {"transposed": True})],
    ids=str,
)
def test_options_that_need_other_averages_are_refused(device, shape, changed, fused) -> None:
    """Before anything is changed; the kernels would write beyond the end of the averages."""
    (param,) = parameters([shape], device)
    optimizer = normuon([param], fused=fused)
    set_gradients(optimizer, 0)
    optimizer.step()
    optimizer.param_groups[0].update(changed)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"second_momentum_buffer of .* has shape .* needs .* Change them"):
        optimizer.step()
    assert_unchanged(optimizer, before)


def test_averages_of_another_size_are_never_written_beyond_their_end(device) -> None:
    """State may come from anywhere: the eager engine takes over, and finds what does not fit."""
    (param,) = parameters([(6, 5)], device)
    optimizer = normuon([param], fused=True)
    set_gradients(optimizer, 0)
    optimizer.step()
    memory = torch.full((12,), -7.0, device=device)
    optimizer.state[param]["second_momentum_buffer"] = memory[:4].view(1, 4, 1)
    set_gradients(optimizer, 1)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()
    assert (memory == -7).all()


def test_gathered_matrices_are_measured_as_their_directions_want(device) -> None:
    """Of one shape, whose outputs are rows, columns or not equalized."""
    options: list[dict[str, Any]] = [{}, {"transposed": True}, {"neuron_beta": None}, {}]
    params = parameters([(5, 9)] * len(options), device)
    groups = [{"params": [param], **some} for param, some in zip(params, options, strict=True)]
    optimizer = normuon(groups, ns_steps=2, fused=True)
    wholes = []
    for i, group in enumerate(optimizer.param_groups):
        n_1RC = gradient(group["params"][0], i)[None].to(launch.HELD_DTYPE)
        wholes.append(Whole(Spec.of(group), (n_1RC,), 1))
    copies = [whole._replace(gathered=(whole.gathered[0].clone(),)) for whole in wholes]
    for of_one, whole in zip(FusedEngine(torch.device(device)).form(copies), wholes, strict=True):
        exact = replace(whole.spec.direction, ns_dtype="float32")
        expected = exact.whole((whole.gathered[0].float(),))
        assert [x.shape for x in of_one] == [x.shape for x in expected]
        for actual, x in zip(of_one, expected, strict=True):
            assert size(actual - x) <= NEURON_SHARE * size(x)


def test_a_gathered_matrix_that_is_too_large_for_the_kernels_is_left_to_the_eager_engine(
    device, monkeypatch
) -> None:
    """Whose shards are small: the refusal of a parameter does not see it."""
    (group,) = muon(parameters([(5, 9)], device), ns_steps=2, fused=True).param_groups
    monkeypatch.setattr(refusals, "MAX_MATRIX", 44)
    direction, n_1RC = Spec.of(group).direction, gradient(group["params"][0], 0)[None]
    wholes = [Whole(Spec.of(group), (n_1RC,), 1)]
    with mock.patch.object(engine, "Polar", side_effect=AssertionError):
        ((x_1RC,),) = FusedEngine(torch.device(device)).form(wholes)
    assert_same_bits(x_1RC, direction.whole((n_1RC,))[0])


def test_sizes_are_measured_in_every_step(device) -> None:
    """No size is left from an earlier step, when the weights were larger."""
    pair = MuonPair(parameters([(9, 5)], device))
    pair.step()
    for param in (*pair.params, *pair.eager_params):
        param.data *= 1e-3
    pair.step()
    change = size(pair.params[0] - pair.before[0]) / size(pair.before[0])
    assert 0.01 < change < 0.5


def test_the_sizes_are_exact(device) -> None:
    """|w| to the last bit, each at its place in the buffer."""
    params = parameters(STACKED, device)
    optimizer = muon_merit(params, ns_steps=1, matrix_dims=2, fused=True)
    set_gradients(optimizer)
    before = [p.detach().clone() for p in params]
    with tiles(), together(2):
        optimizer.step()
    engine = optimizer._engines[params[0].device]
    for i, weight in enumerate(before):
        measured = engine._slots[i][0].view(engine._shared.sizes[0])
        expected = sizes(weight.view(-1, 5, 3), Merit(), is_vector=False)
        assert_same_bits(list(measured), list(expected))


def test_gradients_in_new_tensors_are_used(device) -> None:
    """The old ones are kept alive, so that no address is reused."""
    pair = MuonPair(parameters([(5, 7)], device))
    kept = []
    for _ in range(2):
        pair.step()
        kept.append(pair.params[0].grad)
    assert kept[0].data_ptr() != kept[1].data_ptr()


def test_a_sphere_with_a_clip_uses_the_eager_engine_and_back(device) -> None:
    """Its norm then follows from no products of d."""
    optimizer = sphere(parameters([(9, 5), (4,)], device), ns_steps=2, fused=True)
    for clip in (None, 0.3, None):
        optimizer.param_groups[0]["clip"] = clip
        set_gradients(optimizer)
        optimizer.step()
        (engine,) = optimizer._engines.values()
        assert engine._unfused == (set() if clip is None else {0})


def test_a_weight_on_a_sphere_rests_bit_for_bit(device) -> None:
    """At a rate of 0, and where its gradient was always 0; it has no radius until it moves."""
    weights = parameters([(9, 5), (5, 9)], device)
    weights[0].data[0] = -0.0
    optimizer = sphere(weights, lr=torch.tensor(0.0, device=device), capturable=True, ns_steps=2, fused=True)
    before = [p.detach().clone() for p in weights]
    for lr, first in ((0.0, 0), (0.1, 1)):
        optimizer.param_groups[0]["lr"].fill_(lr)
        set_gradients(optimizer)
        weights[1].grad.zero_()
        optimizer.step()
        for param, was in zip(weights[first:], before[first:], strict=True):
            assert torch.equal(param.view(torch.int32), was.view(torch.int32))
            assert not optimizer.state[param]["radius"].any()
    assert optimizer.state[weights[0]]["radius"].all()


@pytest.mark.parametrize("change", [{"ns_dtype": "float32"}, {"ns_dtype": "float32", "split": 3}], ids=repr)
def test_options_that_the_kernels_do_not_support_use_the_eager_engine_and_back(device, change) -> None:
    pair = MuonPair(parameters([(9, 5), (4,)], device))
    pair.step()
    pair.change(**change)
    pair.step()
    assert pair.engine._unfused == {0}
    assert not held_launches(pair.engine)
    pair.change(split=None)
    pair.fused.param_groups[0]["ns_dtype"] = "bfloat16"
    pair.step()
    assert not pair.engine._unfused
    assert pair.fused.state[pair.params[0]]["step"] == 3


@pytest.mark.parametrize("strided", ["parameter", "gradient"])
def test_tensors_that_are_not_contiguous_use_the_eager_engine(device, strided) -> None:
    """In the same step, with the bits of an eager optimizer."""
    params, others = (parameters([(4, 6), (5, 7)], device) for _ in range(2))
    optimizer, eager = (
        muon_merit(params, ns_steps=2, fused=True),
        muon_merit(others, ns_steps=2, fused=False),
    )
    for step in range(2):
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            grad = gradient(param, 10 * step + i)
            if i == 0 and strided == "parameter":
                for x in (param, other):
                    x.data = x.data.T.contiguous().T
            elif i == 0:
                grad = grad.T.contiguous().T
            param.grad = other.grad = grad
        optimizer.step()
        eager.step()
        assert optimizer._engines[params[0].device]._unfused == {0}
    assert_same_bits(params[0].detach(), others[0].detach())
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2]
    assert size(params[1] - others[1]) < SHARE * size(others[1])


def test_changes_of_a_tensor_learning_rate_take_effect(device) -> None:
    """Changed in place, and replaced by another tensor."""
    pair = MuonPair(parameters([(5, 7)], device), lr=torch.tensor(0.1, device=device), capturable=True)
    pair.step()
    for group in (pair.fused.param_groups[0], pair.eager.param_groups[0]):
        group["lr"].fill_(0.02)
    pair.step()
    pair.change(lr=torch.tensor([0.07], device=device))
    pair.step()


def test_a_group_may_be_added_later(device) -> None:
    """With the same shape, so that it joins a launch."""
    pair = MuonPair(parameters([(5, 7), (6,)], device))
    pair.step()
    for optimizer, params in ((pair.fused, pair.params), (pair.eager, pair.eager_params)):
        new = nn.Parameter(random_tensor((5, 7), 9, device=device))
        optimizer.add_param_group({"params": [new], "direction": "muon", "lr": 0.1})
        params.append(new)
    pair.step()
    pair.step()
    assert [launch.shape for launch in held_launches(pair.engine)] == [(2, 5, 7)]
    assert pair.fused.state[pair.params[2]]["step"] == 2


@pytest.mark.parametrize("build", [muon_merit, sphere], ids=name_of)
@pytest.mark.parametrize("fused_first", [True, False], ids=["fused to eager", "eager to fused"])
def test_a_state_dict_goes_from_one_engine_to_the_other(device, fused_first, build) -> None:
    """The state is the same; the engine and the dtype of products are options of the groups."""
    pair = MuonPair(parameters([(5, 7), (6,), (2, 5, 3)], device), build, matrix_dims=2)
    pair.step()
    optimizers = (pair.fused, pair.eager) if fused_first else (pair.eager, pair.fused)
    saved = copy.deepcopy(optimizers[0].state_dict())
    kept = [
        {key: group[key] for key in ("fused", "ns_dtype") if key in group}
        for group in optimizers[1].param_groups
    ]
    optimizers[1].load_state_dict(saved)
    for group, options in zip(optimizers[1].param_groups, kept, strict=True):
        group.update(options)
    assert_same_bits(optimizers[1].state_dict()["state"], saved["state"])
    pair.step()
    assert [pair.fused.state[p]["step"].item() for p in pair.params] == [2, 2, 2]


def test_a_copied_optimizer_steps_its_own_parameters(device) -> None:
    pair = MuonPair(parameters([(5, 7)], device))
    pair.step()
    before = snapshot(pair.fused)
    twin = copy.deepcopy(pair.fused)
    twin.param_groups[0]["params"][0].grad = gradient(pair.params[0], 100)
    twin.step()
    assert_unchanged(pair.fused, before)
    pair.step()
    assert_same_bits(snapshot(twin), snapshot(pair.fused))


# --- the rest ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (muon_merit, {"clip": 0.7}),
        (muon_merit, {"clip": None, "norm": "l2", "element_wise": False}),
        (muon_merit, {"weight_bound": False}),
        (muon_merit, {"ratio_bounds": (0.0, 0.1)}),  # decides in place of the weight-wise ratio
        (muon, {}),
        (muon, {"hold": "decoupled", "weight_decay": 3.0}),
        (sphere, {}),
    ],
    ids=name_of,
)
def test_the_statistics_equal_the_eager_engine_s(device, build, options) -> None:
    """Including stacked matrices in several chunks."""
    pair = MuonPair(parameters([(9, 17), (3, 5, 3), (6,)], device), build, matrix_dims=2, **options)
    pair.set_gradients()
    recorded = []
    with tiles(), together(2):
        for optimizer in (pair.fused, pair.eager):
            with optimizer.recording() as statistics:
                optimizer.step()
            recorded.append(statistics)
    fused, eager = recorded
    assert len(fused) == 3
    assert fused.keys() == eager.keys()
    for name, expected in eager.items():
        assert fused[name].num_elements == expected.num_elements
        for key in ("clipped", "bounded", "ratio_range", "relative_change"):
            tolerance = pytest.approx(getattr(expected, key), rel=1e-5 if INTERPRETED else SHARE, abs=1e-6)
            assert getattr(fused[name], key) == tolerance, f"{key} of {name}"
    if options.get("clip") == 0.7:
        assert any(0 < x.clipped < 1 for x in eager.values())
        assert any(0 < x.bounded < 1 for x in eager.values())


def test_recording_changes_no_bit_of_the_step(device) -> None:
    def run(*, recorded: bool) -> Any:
        optimizer = muon_merit(parameters([(3, 5, 3)], device), ns_steps=2, matrix_dims=2, fused=True)
        set_gradients(optimizer)
        if recorded:
            with optimizer.recording():
                optimizer.step()
        else:
            optimizer.step()
        return snapshot(optimizer)

    assert_same_bits(run(recorded=True), run(recorded=False))


def test_no_gradient_is_changed(device) -> None:
    pair = MuonPair(parameters([(5, 7)], device), maximize=True, max_grad_norm=0.1)
    grad = gradient(pair.params[0], 0)
    kept = grad.clone()
    pair.step([grad])
    assert_same_bits(grad, kept)


def test_the_tables_do_not_follow_a_default_device(device) -> None:
    """With ``torch.set_default_device``, tensors that are indexed on the host stay on the host."""
    pair = MuonPair(parameters([(5, 7)], device))
    pair.before = [p.detach().clone() for p in pair.params]
    pair.set_gradients()
    with torch.device("meta"):
        (part,), rest = FusedEngine(pair.params[0].device).parts_of(pair.fused._gather(), Control())
    assert not rest
    part.advance()  # outside: Triton's interpreter follows the default device
    part.apply(None)
    pair.eager.step()
    pair.compare()


@pytest.mark.parametrize("build", [muon_merit, normuon], ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_tables_do_not_follow_a_default_dtype(device, build, dtype) -> None:
    pair = MuonPair(parameters([(9, 17), (9, 17), (20,)], device), build)
    with default_dtype(dtype):
        for _ in range(2):
            pair.step()
    assert not pair.engine._unfused


def test_autograd_notices_that_weights_have_changed(device) -> None:
    """Including a stacked weight whose last chunk does not contain its first matrix."""
    (weight,) = parameters([(3, 5, 3)], device)
    optimizer = muon_merit([weight], ns_steps=1, matrix_dims=2, fused=True)
    inputs = torch.ones(3, 2, 5, device=device, requires_grad=True)
    loss = (inputs @ weight).square().sum()
    loss.backward(retain_graph=True)
    with together(2):
        optimizer.step()
    assert weight._version > 0
    assert optimizer.state[weight]["momentum_buffer"]._version > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("build", "options"), [(muon_merit, {"norm": "l2", "element_wise": False}), (sphere, {})], ids=name_of
)
def test_a_run_repeats_bit_for_bit(device, build, options) -> None:
    def run() -> tuple[list[Tensor], dict[str, Any]]:
        optimizer = build(parameters([(9, 17), (6,)], device), ns_steps=2, fused=True, **options)
        for step in range(2):
            set_gradients(optimizer, step)
            with tiles():
                optimizer.step()
        return snapshot(optimizer)

    assert_same_bits(run(), run())


def test_in_bfloat16_it_is_near_the_eager_engine(device, monkeypatch) -> None:
    """With the users' options; less close in the interpreter than on a GPU, because it truncates."""
    monkeypatch.setattr(launch, "HELD_DTYPE", torch.bfloat16)
    params, others = (parameters([(9, 17), (17, 9)], device) for _ in range(2))
    starts = [p.detach().clone() for p in params]
    for weights, fused in ((params, True), (others, False)):
        optimizer = muon_merit(weights, lr=0.05, fused=fused)
        set_gradients(optimizer)
        optimizer.step()
    for param, other, start in zip(params, others, starts, strict=True):
        assert size(param - other) <= SHARE * size(other - start)


def test_hundreds_of_elements_are_within_ulps_of_the_definition() -> None:
    """The pairs above compare with the eager engine; this compares with the definition."""
    if not INTERPRETED:
        pytest.skip("products of float32 are coarser on a GPU")
    (param,) = parameters([(17, 37)], "cpu")
    before, param.grad = param.detach().clone(), gradient(param, 0)
    optimizer = muon_merit([param], lr=0.05, fused=True)
    with tiles():
        optimizer.step()
    n = param.grad * 0.1 * 0.9 + param.grad * 0.1
    expected = stepped(before.double(), n.double(), optimizer.param_groups[0])
    assert_within_ulps(param, expected.float(), ULPS)
