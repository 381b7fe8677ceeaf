"""Statistics of an update: equal to a direct computation, only when recorded, whatever the pieces."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from optimizer_cases import (
    FAMILY,
    HIDDEN,
    Hidden,
    assert_same_bits,
    is_soap,
    name_of,
    parameters,
    params_of,
    random_tensor,
    take_steps,
)
from torch import Tensor, nn

from merit_optim import MERIT, SOAP, MuonMERIT, UpdateStatistics
from merit_optim.optim import algorithm
from merit_optim.optim.axes.ratios import Merit
from merit_optim.optim.axes.ratios.ratio import sizes
from merit_optim.optim.engines.eager import cpu, foreach, limits
from merit_optim.optim.family import Family
from merit_optim.optim.options import rate
from merit_optim.optim.spec import Spec


@contextmanager
def never_measured() -> Iterator[None]:
    with (
        mock.patch.object(cpu, "measure", side_effect=AssertionError("measured")),
        mock.patch.object(foreach, "measure", side_effect=AssertionError("measured")),
    ):
        yield


SHAPES = {"matrix": (9, 14), "convolution": (5, 3, 2), "vector": (11,), "stacked": (3, 4, 5)}


class Before(NamedTuple):
    """A parameter, and its weight and state before the step that is recorded."""

    param: nn.Parameter
    weight: Tensor
    state: dict[str, Tensor]


def expected_statistics(optimizer: Family, before: Before) -> dict[str, float | tuple[float, float]]:
    """From algorithm.py and the directions, for the step just taken."""
    group = next(group for group in optimizer.param_groups if any(p is before.param for p in group["params"]))
    spec = Spec.of(group)
    ratio, view, direction = spec.ratio, spec.view, spec.direction
    is_vector = view.matrices(before.weight.shape).is_vector
    tensors = (before.weight, before.param.grad, *before.state.values())
    weight, grad, *state = (view.seen(x, before.weight.shape) for x in tensors)
    of_direction, of_ratio, _ = spec.divided(state)
    lr, decay, step = rate(group), group["weight_decay"], optimizer.state[before.param]["step"].item()
    d, _ = direction.advance(grad, tuple(of_direction), step)
    update = spec.hold.inside(d, weight, decay)
    of_both = (sizes(x, ratio, is_vector=is_vector) for x in (weight, update))
    ratios, undefined = algorithm.ratios_of(*of_both)
    ratios, _ = ratio.remember(ratios, undefined, of_ratio)
    scale = ratio.scale(ratios, undefined).expand_as(weight)
    unbound = replace(ratio, weight_bound=False) if isinstance(ratio, Merit) else ratio
    without_bound = unbound.scale(ratios, undefined).expand_as(weight)
    scaled = scale * update
    of_step = before.weight, before.param.grad, list(before.state.values())
    after = algorithm.step(*of_step, spec=spec, lr=lr, weight_decay=decay, step=step).weight
    return {
        "clipped": 0.0 if ratio.clip is None else (scaled.abs() > ratio.clip).double().mean().item(),
        "bounded": (scale > without_bound).double().mean().item()
        if ratio.has_rows and not is_vector
        else 0.0,
        "ratio_range": (scale.min().item(), scale.max().item()),
        "relative_change": ((after - before.weight).norm() / weight.norm()).item(),
    }


def recorded_step(
    device: torch.device, optimizer_class: Any = MERIT, **options: object
) -> tuple[Family, dict[str, UpdateStatistics], dict[str, Before]]:
    """One recorded step, with the parameters and state before it."""
    named = {
        name: nn.Parameter(random_tensor(shape, i, scale=3.0, device=device))
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    optimizer = optimizer_class(list(named.items()), lr=0.1, **options)
    take_steps(optimizer, 1)
    named["matrix"].data[2] = 0  # a row without a ratio
    before = {
        name: Before(
            p, p.detach().clone(), {k: x.clone() for k, x in optimizer.state[p].items() if k != "step"}
        )
        for name, p in named.items()
    }
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1, first=1)
    return optimizer, statistics, before


VARIANTS = [
    {},
    {"clip": 0.5},
    {"clip": None},
    {"element_wise": False},
    {"weight_bound": False},
    {"norm": "l2"},
    {"matrix_dims": 2},
]


RECORDED = [
    *((MERIT, options) for options in VARIANTS),
    *((optimizer_class, {}) for optimizer_class in HIDDEN),
    *((Hidden(MuonMERIT, neuron_beta=None, ratio_bounds=None), options) for options in VARIANTS if options),
]


@pytest.mark.parametrize(("optimizer_class", "options"), RECORDED, ids=name_of)
@pytest.mark.parametrize("foreach", [False, True])
def test_statistics_equal_a_direct_computation(device, optimizer_class, options, foreach) -> None:
    optimizer, statistics, before = recorded_step(device, optimizer_class, foreach=foreach, **options)
    assert set(statistics) == set(SHAPES)
    for name, was in before.items():
        measured, expected = statistics[name], expected_statistics(optimizer, was)
        assert measured.num_elements == was.weight.numel()
        for key, value in expected.items():
            assert getattr(measured, key) == pytest.approx(value, rel=1e-5), (name, key)


@pytest.mark.parametrize(
    "optimizer_class", [MERIT, Hidden(MuonMERIT, neuron_beta=None, ratio_bounds=None)], ids=name_of
)
def test_the_matrices_of_a_split_weight_are_counted_together(device, optimizer_class) -> None:
    """Like the merged statistics of three weights."""
    whole = nn.Parameter(random_tensor((9, 14), 0, scale=3.0, device=device))
    thirds = [nn.Parameter(third.clone()) for third in whole.detach().split(3)]
    whole.grad = random_tensor((9, 14), 1, device=device)
    for third, grad in zip(thirds, whole.grad.split(3), strict=True):
        third.grad = grad.clone()
    recorded = []
    for params, options in (([whole], {"split": 3}), (thirds, {})):
        optimizer = optimizer_class(params, clip=3.0, fused=False, **options)
        with optimizer.recording() as statistics:
            optimizer.step()
        recorded.append(list(statistics.values()))
    (together,), (first, second, third) = recorded
    merged = first.merge(second).merge(third)
    assert 0 < together.bounded < 1
    assert (together.clipped, together.bounded) == (merged.clipped, merged.bounded)
    assert together.ratio_range == merged.ratio_range
    assert together.relative_change == pytest.approx(merged.relative_change, rel=1e-6)


@pytest.mark.parametrize("optimizer_class", list(filter(is_soap, HIDDEN)), ids=name_of)
def test_a_step_that_only_computes_a_basis_is_no_update(device, optimizer_class) -> None:
    named = {name: nn.Parameter(random_tensor(shape, 0, device=device)) for name, shape in SHAPES.items()}
    optimizer = optimizer_class(list(named.items()))
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
        assert set(statistics) == {"vector"}
        take_steps(optimizer, 1, first=1)
        assert set(statistics) == set(SHAPES)


@pytest.mark.parametrize("optimizer_class", [MERIT, Hidden(MuonMERIT)], ids=name_of)
@pytest.mark.parametrize("piece", [1, 14, 40])
def test_statistics_do_not_depend_on_the_pieces(device, optimizer_class, piece) -> None:
    _, whole, _ = recorded_step(device, optimizer_class, fused=False)
    with (
        mock.patch.object(limits, "PIECE_ELEMENTS_CPU", piece),
        mock.patch.object(limits, "PIECE_ELEMENTS", piece),
    ):
        _, cut, _ = recorded_step(device, optimizer_class, fused=False)
    for name in SHAPES:
        assert cut[name].num_elements == whole[name].num_elements
        for key in ("clipped", "bounded", "ratio_range"):
            assert getattr(cut[name], key) == getattr(whole[name], key)
        assert cut[name].relative_change == pytest.approx(whole[name].relative_change, rel=1e-6)


@pytest.mark.parametrize("optimizer_class", [*FAMILY, *HIDDEN], ids=name_of)
def test_recording_changes_no_bit_of_the_step(device, optimizer_class) -> None:
    params, plain = parameters(device), parameters(device)
    optimizer, reference = optimizer_class(params, fused=False), optimizer_class(plain, fused=False)
    with optimizer.recording():
        take_steps(optimizer, 2)
    take_steps(reference, 2)
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


def test_nothing_is_recorded_outside(device) -> None:
    optimizer = MERIT(parameters(device))
    with never_measured():
        take_steps(optimizer, 2)
    with optimizer.recording() as statistics:
        assert not statistics
        take_steps(optimizer, 1, first=2)
    assert len(statistics) == 6
    kept = statistics["parameter 0 of group 0"]
    take_steps(optimizer, 1, first=3)
    assert statistics["parameter 0 of group 0"] is kept


def test_each_step_replaces_the_statistics_of_the_one_before(device) -> None:
    params = parameters(device)
    optimizer = MERIT(params)
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
        first = statistics["parameter 0 of group 0"].relative_change
        take_steps(optimizer, 1, first=1)
        assert statistics["parameter 0 of group 0"].num_elements == params[0].numel()
        assert statistics["parameter 0 of group 0"].relative_change != first
        params[0].grad = None
        optimizer.step()
        assert "parameter 0 of group 0" not in statistics
        optimizer.zero_grad()
        optimizer.step()
        assert not statistics


def test_recording_ends_after_an_error(device) -> None:
    optimizer = MERIT(parameters(device))

    def fail() -> None:
        with optimizer.recording():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with never_measured():
        take_steps(optimizer, 1)


def test_recordings_that_overlap_end_in_any_order(device) -> None:
    optimizer = MERIT(parameters(device))
    first, second = optimizer.recording(), optimizer.recording()
    seen_first, seen_second = first.__enter__(), second.__enter__()
    take_steps(optimizer, 1)
    first.__exit__(None, None, None)
    ended = dict(seen_first)
    assert list(seen_first) == list(seen_second) != []
    take_steps(optimizer, 1, first=1)
    assert all(seen_first[name] is ended[name] is not seen_second[name] for name in ended)
    second.__exit__(None, None, None)
    ended = dict(seen_second)
    take_steps(optimizer, 1, first=2)
    assert all(seen_second[name] is ended[name] for name in ended)


def test_a_skipped_step_leaves_no_statistics_of_the_one_before() -> None:
    optimizer = MERIT(parameters("cpu"), nonfinite="skip")
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
        assert statistics
        optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)
        optimizer.step()
        assert not statistics


def test_parameters_with_the_same_name_are_refused() -> None:
    layers = [torch.nn.Linear(size, size) for size in (3, 5)]
    optimizer = MERIT([{"params": list(layer.named_parameters())} for layer in layers])
    with pytest.raises(ValueError, match="2 parameters are named 'weight'"), optimizer.recording():
        pass
    take_steps(optimizer, 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # from dynamo's imports
@pytest.mark.parametrize("optimizer_class", [MERIT, Hidden(MuonMERIT), Hidden(SOAP)], ids=name_of)
@pytest.mark.slow
def test_a_compiled_step_is_recorded_too(optimizer_class) -> None:
    torch.compiler.reset()
    optimizer = optimizer_class(parameters("cpu"))
    step = torch.compile(optimizer.step, backend="eager")
    take_steps(optimizer, 1)
    step()
    with optimizer.recording() as statistics:
        step()
    assert len(statistics) == len(params_of(optimizer))


def test_the_relative_change_of_a_weight_of_zeros(device) -> None:
    """Biases in the first step of a schedule that starts at zero: nothing changed."""
    bias = nn.Parameter(torch.zeros(3, device=device))
    bias.grad = torch.ones_like(bias)
    for lr, change in ((0.0, 0.0), (0.1, float("inf"))):
        optimizer = MERIT([("bias", bias)], lr=lr)
        with optimizer.recording() as statistics:
            optimizer.step()
        assert statistics["bias"].relative_change == change


def test_statistics_are_in_the_order_of_the_parameters(device) -> None:
    optimizer = MERIT([{"params": parameters(device)}, {"params": parameters(device), "lr": 0.1}])
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
    assert list(statistics) == [name for index in (0, 1) for name, _ in optimizer._named(index)]
