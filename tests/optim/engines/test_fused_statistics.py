"""Statistics of an update from the fused engine: equal to the eager one's, and without effect on the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, name_of, snapshot, take_steps

pytest.importorskip("triton", reason="the fused engine needs triton, which is not installed")

from fused_cases import Pair, gradient, parameters, tiles

from merit_optim import LAMB, MERIT, MaxLAMB
from merit_optim.optim.engines.fused.engine import FusedEngine, Launch
from merit_optim.optim.engines.work import Control
from merit_optim.optim.statistics import Recorder

SHAPES = [(9, 37), (11,), (3, 4, 5), (), (5, 2)]

VARIANTS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (MERIT, {"clip": 3.0}),
    (MERIT, {"clip": None}),
    (MERIT, {"element_wise": False}),
    (MERIT, {"weight_bound": False}),
    (MERIT, {"matrix_dims": 2, "maximize": True}),
    (MERIT, {"ratio": "none", "clip": 0.5}),
    (LAMB, {"clip": 0.5}),
    (MaxLAMB, {}),
]


def recorded_step(pair: Pair) -> tuple[Recorder, Recorder]:
    """A step that each engine records."""
    pair.set_gradients()
    recorders = []
    for optimizer in (pair.fused, pair.eager):
        with optimizer.recording() as statistics:
            optimizer.step()
        recorders.append(statistics)
    pair.num_steps += 1
    pair.compare()
    fused, eager = recorders
    return fused, eager


@pytest.mark.parametrize(("build", "options"), VARIANTS, ids=name_of)
def test_the_statistics_equal_the_eager_engine_s(device, build, options) -> None:
    params = parameters(SHAPES, device, scale=3.0)
    with torch.no_grad():
        params[0][2] = 0  # a row without a ratio
    pair = Pair(params, build, lr=0.1, **options)
    with tiles():
        for _ in range(2):
            fused, eager = recorded_step(pair)
            assert fused.keys() == eager.keys()
            assert len(fused) == len(SHAPES)
            for name, expected in eager.items():
                actual = fused[name]
                assert actual.num_elements == expected.num_elements
                for key in ("clipped", "bounded", "ratio_range", "relative_change"):
                    where = f"{key} of {name}"
                    assert getattr(actual, key) == pytest.approx(getattr(expected, key), rel=1e-5), where


def test_the_examples_here_clip_and_bound_some_elements_but_not_all(device) -> None:
    params = parameters(SHAPES[:1], device, scale=3.0)
    optimizer = MERIT(params, lr=0.1, clip=3.0, fused=True)
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
    (measured,) = statistics.values()
    assert 0 < measured.clipped < 1
    assert 0 < measured.bounded < 1
    low, high = measured.ratio_range
    assert low < high


def test_the_names_are_those_of_the_parameters(device) -> None:
    """Also if a parameter uses the eager engine, one is empty, and one has no gradient."""
    params = parameters([(3, 4), (4, 6), (0, 2), (2, 2), (5,)], device)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer = MERIT([{"params": named[:2]}, {"params": named[2:]}], fused=True)
    params[1].data = params[1].data.T.contiguous().T
    for i, param in enumerate(params):
        param.grad = None if i == 3 else gradient(param, i)
    with optimizer.recording() as statistics:
        optimizer.step()
    sizes = {name: x.num_elements for name, x in statistics.items()}
    assert sizes == {"layer.0": 12, "layer.1": 24, "layer.4": 5}


@pytest.mark.parametrize("build", [MERIT, LAMB], ids=name_of)
def test_recording_changes_no_bit_of_the_step(device, build) -> None:
    def run(*, recorded: bool) -> Any:
        optimizer = build(parameters(SHAPES[:2], device), fused=True)
        with tiles():
            take_steps(optimizer, 1)
            if recorded:
                with optimizer.recording():
                    take_steps(optimizer, 1, first=1)
            else:
                take_steps(optimizer, 1, first=1)
        return snapshot(optimizer)

    assert_same_bits(run(recorded=True), run(recorded=False))


def test_nothing_is_recorded_outside(device, monkeypatch) -> None:
    optimizer = MERIT(parameters([(3, 4)], device), fused=True)
    with optimizer.recording() as statistics:
        take_steps(optimizer, 1)
    kept = dict(statistics)
    monkeypatch.setattr(Launch, "record", lambda *_: pytest.fail("recorded"))
    take_steps(optimizer, 1, first=1)
    assert dict(statistics) == kept


def test_each_step_replaces_the_statistics_of_the_one_before(device) -> None:
    pair = Pair(parameters([(3, 4)], device))
    with pair.fused.recording() as statistics:
        pair.step()
        (first,) = statistics.values()
        pair.step()
        (second,) = statistics.values()
    assert second.num_elements == first.num_elements
    assert second.relative_change != first.relative_change


def test_a_step_that_the_device_skips_records_that_nothing_changed(device, monkeypatch) -> None:
    """Not the previous contents of the memory."""
    params = parameters([(3, 4)], device)
    params[0].grad = gradient(params[0], 0)
    works = MERIT(params, fused=True)._gather()
    recorder = Recorder()
    control = Control(skip=torch.tensor(True, device=device))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: torch.full(args, 7.0, **kwargs))
    (part,), _ = FusedEngine(device).parts_of(works, control)
    part.advance()
    part.apply(recorder)
    (statistics,) = recorder.values()
    assert (statistics.clipped, statistics.bounded, float(statistics.update_sum_sq)) == (0, 0, 0)
