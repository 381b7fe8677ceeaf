"""Statistics of an update: against a direct computation, only when asked for, whatever the pieces."""

from unittest import mock

import pytest
import torch
from optimizer_cases import (
    FAMILY,
    adam_update,
    assert_same_bits,
    name_of,
    parameters,
    random_tensor,
    take_steps,
)
from torch import Tensor, nn

from merit_optim import LAMB, MERIT, UpdateStatistics
from merit_optim.optim import algorithm
from merit_optim.optim.engines import eager
from merit_optim.optim.matrices import matrices_of
from merit_optim.optim.statistics import measure

SHAPES = {"matrix": (9, 14), "convolution": (5, 3, 2), "vector": (11,), "stacked": (3, 4, 5)}


def expected_statistics(
    optimizer: MERIT, weight: Tensor, name: str
) -> dict[str, float | tuple[float, float]]:
    """From algorithm.py, for the step just taken from ``weight``."""
    group = optimizer.param_groups[0]
    param = group["params"][group["param_names"].index(name)]
    rule = algorithm.Rule(group["clip"], group["element_wise"], group["weight_bound"], group["norm"])
    matrices = matrices_of(weight.shape, group["matrix_dims"])
    state = {key: x.reshape(matrices.shape) for key, x in optimizer.state[param].items() if x.ndim}
    weight = weight.reshape(matrices.shape)
    update = adam_update(state["exp_avg"], state["exp_avg_sq"], weight, group["eps"], group["weight_decay"])
    sizes = [algorithm.sizes(x, rule, is_vector=matrices.is_vector) for x in (weight, update)]
    scale = algorithm.element_ratio(*sizes, rule).expand_as(weight)
    without_bound = algorithm.element_ratio(*sizes, rule._replace(weight_bound=False)).expand_as(weight)
    has_rows = rule.element_wise and not matrices.is_vector
    scaled = scale * update
    taken = scaled if rule.clip is None else scaled.clamp(-rule.clip, rule.clip)
    return {
        "clipped": 0.0 if rule.clip is None else (scaled.abs() > rule.clip).double().mean().item(),
        "bounded": (scale > without_bound).double().mean().item() if has_rows else 0.0,
        "ratio_range": (scale.min().item(), scale.max().item()),
        "relative_change": (group["lr"] * taken.norm() / weight.norm()).item(),
    }


def recorded_step(
    device: torch.device, **options: object
) -> tuple[MERIT, dict[str, UpdateStatistics], list[Tensor]]:
    """One recorded step, and the weights before it."""
    params = [
        nn.Parameter(random_tensor(s, i, scale=3.0, device=device)) for i, s in enumerate(SHAPES.values())
    ]
    optimizer = MERIT(list(zip(SHAPES, params, strict=True)), lr=0.1, **options)
    take_steps(optimizer, 1)
    params[0].data[2] = 0  # a row without a ratio
    before = [p.detach().clone() for p in params]
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


@pytest.mark.parametrize("options", VARIANTS, ids=repr)
@pytest.mark.parametrize("foreach", [False, True])
def test_statistics_equal_a_direct_computation(device, options, foreach) -> None:
    optimizer, statistics, before = recorded_step(device, foreach=foreach, **options)
    assert set(statistics) == set(SHAPES)
    for name, weight in zip(SHAPES, before, strict=True):
        measured, expected = statistics[name], expected_statistics(optimizer, weight, name)
        assert measured.num_elements == weight.numel()
        for key, value in expected.items():
            assert getattr(measured, key) == pytest.approx(value, rel=1e-5), (name, key)


def test_the_examples_here_clip_and_bound_some_elements_but_not_all(device) -> None:
    _, statistics, _ = recorded_step(device, clip=3.0)
    assert 0 < statistics["matrix"].clipped < 1
    assert 0 < statistics["matrix"].bounded < 1
    low, high = statistics["matrix"].ratio_range
    assert low < high


@pytest.mark.parametrize("piece", [1, 14, 40])
def test_statistics_do_not_depend_on_the_pieces(device, piece) -> None:
    _, whole, _ = recorded_step(device, fused=False)
    with (
        mock.patch.object(eager, "PIECE_ELEMENTS_CPU", piece),
        mock.patch.object(eager, "PIECE_ELEMENTS", piece),
    ):
        _, cut, _ = recorded_step(device, fused=False)
    for name in SHAPES:
        assert cut[name].num_elements == whole[name].num_elements
        for key in ("clipped", "bounded", "ratio_range"):
            assert getattr(cut[name], key) == getattr(whole[name], key)
        assert cut[name].relative_change == pytest.approx(whole[name].relative_change, rel=1e-6)


def test_two_parts_merge_to_the_statistics_of_the_whole() -> None:
    def part(
        n: int, clipped: int, bounded: int, low: float, high: float, u: float, w: float
    ) -> UpdateStatistics:
        return UpdateStatistics(n, *(torch.tensor(x) for x in (clipped, bounded, low, high, u, w)))

    both = part(6, 3, 1, 0.5, 2.0, 1.0, 20.0).merge(part(4, 0, 3, 0.7, 3.0, 3.0, 44.0))
    assert (both.clipped, both.bounded, both.num_elements) == (0.3, 0.4, 10)
    assert both.ratio_range == pytest.approx((0.5, 3.0))
    assert both.relative_change == pytest.approx(0.25)


@pytest.mark.parametrize("optimizer_class", FAMILY, ids=name_of)
def test_recording_changes_no_bit_of_the_step(device, optimizer_class) -> None:
    params, plain = parameters(device), parameters(device)
    optimizer, reference = optimizer_class(params, fused=False), optimizer_class(plain, fused=False)
    with optimizer.recording():
        take_steps(optimizer, 2)
    take_steps(reference, 2)
    assert_same_bits([p.detach() for p in params], [p.detach() for p in plain])


def test_nothing_is_recorded_outside(device) -> None:
    optimizer = MERIT(parameters(device))
    with mock.patch.object(eager, "measure", side_effect=AssertionError("measured")):
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


def test_recording_ends_after_an_error(device) -> None:
    optimizer = MERIT(parameters(device))

    def fail() -> None:
        with optimizer.recording():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with mock.patch.object(eager, "measure", side_effect=AssertionError("measured")):
        take_steps(optimizer, 1)


def test_relative_change_of_lamb_is_the_learning_rate(device) -> None:
    """Its update has the size of the weight, so the statistics of one can be known beforehand."""
    optimizer = LAMB(parameters(device), lr=0.25)
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
    for measured in statistics.values():
        assert measured.relative_change == pytest.approx(0.25, rel=1e-5)
        assert measured.clipped == measured.bounded == 0


def test_a_recording_inside_another_leaves_it_what_it_saw(device) -> None:
    optimizer = MERIT(parameters(device))
    with optimizer.recording() as outer:
        with optimizer.recording() as inner:
            take_steps(optimizer, 1)
        assert outer.keys() == inner.keys() != set()
        outer.clear()
        take_steps(optimizer, 1, first=1)
        assert outer.keys() == inner.keys()


def test_a_recording_without_a_step_takes_nothing_from_the_one_around_it(device) -> None:
    optimizer = MERIT(parameters(device))
    with optimizer.recording() as outer:
        take_steps(optimizer, 1)
        with optimizer.recording() as inner:
            pass
        assert not inner
        assert outer


def test_an_element_at_the_clip_is_not_clipped() -> None:
    scaled = torch.tensor([1.0, -1.0, 0.5, -1.5])
    found = measure(torch.ones(4), scaled, torch.ones(1), None, clip=1.0, lr=0.1)
    assert found.clipped == 0.25


def test_a_skipped_step_leaves_no_statistics_of_the_one_before() -> None:
    optimizer = MERIT(parameters("cpu"), nonfinite="skip")
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
        assert statistics
        optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)
        optimizer.step()
        assert not statistics


def test_parameters_of_one_name_are_refused() -> None:
    layers = [torch.nn.Linear(size, size) for size in (3, 5)]
    optimizer = MERIT([{"params": list(layer.named_parameters())} for layer in layers])
    with pytest.raises(ValueError, match="2 parameters are named 'weight'"), optimizer.recording():
        pass
    take_steps(optimizer, 1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # of what dynamo imports
def test_a_compiled_step_is_recorded_too() -> None:
    torch.compiler.reset()
    optimizer = MERIT(parameters("cpu"))
    step = torch.compile(optimizer.step, backend="eager")
    take_steps(optimizer, 1)
    step()
    with optimizer.recording() as statistics:
        step()
    assert len(statistics) == len(optimizer.param_groups[0]["params"])


def test_the_relative_change_of_a_weight_of_zeros(device) -> None:
    """As biases are in the first step of a schedule that begins at zero: nothing changed."""
    bias = nn.Parameter(torch.zeros(3, device=device))
    bias.grad = torch.ones_like(bias)
    for lr, change in ((0.0, 0.0), (0.1, float("inf"))):
        optimizer = MERIT([("bias", bias)], lr=lr)
        with optimizer.recording() as statistics:
            optimizer.step()
        assert statistics["bias"].relative_change == change
