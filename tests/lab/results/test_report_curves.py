"""Curves are read from the metrics, thinned and averaged."""

import itertools
import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from statistics import fmean

import pytest

from merit_lab.results.curves import (
    MOST_POINTS,
    CurveReader,
    Line,
    ThinnedCurves,
    mean_curve,
    read_curves,
    thin,
    tokens_per_step,
)


def test_every_kind_of_measurement_becomes_curves() -> None:
    update = {"clipped": 0.1, "bounded": 0.2, "relative_change": 0.3}
    other = {"clipped": 0.3, "bounded": 0.2, "relative_change": 0.3}
    curves = read_curves(
        {
            "validation": [{"step": 0, "tokens": 0, "loss": 5.0}],
            "train": [
                {"step": 1, "tokens": 64, "loss": 4.0, "lr": 0.1, "grad_norm": 2.0, "weight_norm": 9.0}
            ],
            "attention": [
                {"step": 0, "max_logits": [[1.0, 3.0], [7.0, 2.0]], "entropy": [[1.0, 2.0], [0.5, 0.5]]}
            ],
            "update": [{"step": 1, "parameters": {"a": update, "b": other}}],
        }
    )
    assert curves == {
        "validation_loss": [(0, 5.0)],
        "training_loss": [(1, 4.0)],
        "grad_norm": [(1, 2.0)],
        "weight_norm": [(1, 9.0)],
        "lr": [(1, 0.1)],
        "max_logit": [(0, 7.0)],
        "max_logit_layer_1": [(0, 3.0)],
        "max_logit_layer_2": [(0, 7.0)],
        "entropy_mean": [(0, 1.0)],
        "entropy_lowest": [(0, 0.5)],
        "clipped": [(1, 0.2)],
        "bounded": [(1, 0.2)],
        "relative_change": [(1, 0.3)],
    }


@pytest.mark.parametrize("heads", [[math.nan, 3.0], [3.0, math.nan]])
def test_a_nan_of_any_head_is_seen(heads: list[float]) -> None:
    row = {"step": 1, "max_logits": [[7.0, 2.0], heads], "entropy": [[1.0, 2.0], heads]}
    curves = read_curves({"attention": [row]})
    assert curves["max_logit_layer_1"] == [(1, 7.0)]
    for name in ("max_logit", "max_logit_layer_2", "entropy_mean", "entropy_lowest"):
        ((_, value),) = curves[name]
        assert math.isnan(value), name


def test_a_short_curve_is_left_unchanged() -> None:
    points = [(step, float(step)) for step in range(10)]
    assert thin([points], limit=10, combine=max) == [points]


def test_thinned_curves_are_cut_at_the_same_steps() -> None:
    long = [(step, float(step)) for step in range(1, 101)]
    short = long[:50]
    thinned = thin([long, short], limit=10, combine=max)
    assert thinned[0] == [(step, float(step)) for step in range(10, 101, 10)]
    assert thinned[1] == thinned[0][:5]


def test_the_mean_ends_where_the_first_run_ends() -> None:
    assert mean_curve([[(0, 2.0), (1, 4.0), (2, 9.0)], [(0, 4.0), (1, 2.0)]]) == [(0, 3.0), (1, 3.0)]


def test_tokens_of_a_step_come_from_the_records() -> None:
    assert tokens_per_step({"validation": [{"step": 0, "tokens": 0}, {"step": 4, "tokens": 256}]}) == 64
    assert math.isnan(tokens_per_step({"validation": [{"step": 0, "tokens": 0}]}))


LONG = range(1, 30_001)


def sometimes_slow(step: int) -> float:
    return 10.0 if step % 10 == 1 else 100.0


def read(lines: Iterable[Line]) -> ThinnedCurves:
    reader = CurveReader()
    for line in lines:
        reader.add(line)
    return reader.curves()


def train(num_steps: int, **values: Callable[[int], float]) -> Iterator[Line]:
    for step in range(1, num_steps + 1):
        yield {"kind": "train", "step": step, **{key: value(step) for key, value in values.items()}}


def test_a_curve_of_few_points_is_read_unchanged() -> None:
    thinned = read(train(MOST_POINTS, loss=float))
    assert thinned.curves == {"training_loss": [(step, float(step)) for step in range(1, MOST_POINTS + 1)]}
    assert thinned.steps == {"training_loss": 1}
    seldom = [{"kind": "validation", "step": step, "loss": 2.0} for step in range(0, 10**6, 250)]
    assert len(read(seldom).curves["validation_loss"]) == 4000, "steps are many, points are not"


def test_a_long_curve_is_thinned_while_reading() -> None:
    logits = (
        {"kind": "attention", "step": step, "max_logits": [[9.0 if step == 777 else 1.0]]} for step in LONG
    )
    thinned = read(itertools.chain(train(LONG[-1], loss=float, tokens_per_second=sometimes_slow), logits))
    assert set(thinned.steps.values()) == {8}
    loss = thinned.curves["training_loss"]
    assert loss[:2] == [(8, 4.5), (16, 12.5)], "the mean"
    assert loss[-1] == (LONG[-1], LONG[-1]), "the last point is kept as measured"
    assert len(loss) == LONG[-1] // 8 + 1
    assert {value for _, value in thinned.curves["tokens_per_second"]} == {100.0}, "the median"
    assert (784, 9.0) in thinned.curves["max_logit"], "the largest"


def test_nan_does_not_affect_its_neighbours() -> None:
    (loss,) = read(
        train(LONG[-1], loss=lambda step: math.nan if step in (3, LONG[-1]) else 2.0)
    ).curves.values()
    assert loss[0] == (8, 2.0)
    assert math.isnan(loss[-1][1])


def test_a_seed_that_ended_early_shares_its_steps_with_the_others() -> None:
    whole, short = (read(train(num_steps, loss=float)) for num_steps in (LONG[-1], 6_000))
    assert whole.steps != short.steps
    thinned = thin([run.curves["training_loss"] for run in (whole, short)], limit=240, combine=fmean)
    assert len(mean_curve(thinned)) > 30
    assert mean_curve(thinned)[0][0] == 128


def test_reading_a_long_run_takes_little_memory() -> None:
    """It keeps 16 bytes per point and no lines."""
    tracemalloc.start()
    try:
        thinned = read(train(200_000, loss=float, lr=float))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 * 200_000 * 16 * 2.5
    assert max(map(len, thinned.curves.values())) <= MOST_POINTS + 1
