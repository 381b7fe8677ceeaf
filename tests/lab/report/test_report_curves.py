"""Curves: read from the metrics, thinned, averaged."""

import math

import pytest

from merit_lab.report.curves import mean_curve, read_curves, thin, tokens_per_step


def test_every_kind_of_measurement_becomes_curves() -> None:
    update = {"clipped": 0.1, "bounded": 0.2, "relative_change": 0.3}
    other = {"clipped": 0.3, "bounded": 0.2, "relative_change": 0.3}
    curves = read_curves(
        {
            "validation": [{"step": 0, "tokens": 0, "loss": 5.0}],
            "train": [{"step": 1, "tokens": 64, "loss": 4.0, "lr": 0.1, "grad_norm": 2.0}],
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
def test_a_nan_of_one_head_is_seen_wherever_it_stands(heads: list[float]) -> None:
    row = {"step": 1, "max_logits": [[7.0, 2.0], heads], "entropy": [[1.0, 2.0], heads]}
    curves = read_curves({"attention": [row]})
    assert curves["max_logit_layer_1"] == [(1, 7.0)]
    for name in ("max_logit", "max_logit_layer_2", "entropy_mean", "entropy_lowest"):
        ((_, value),) = curves[name]
        assert math.isnan(value), name


def test_a_short_curve_is_left_as_it_is() -> None:
    points = [(step, float(step)) for step in range(10)]
    assert thin([points], limit=10, combine=max) == [points]


def test_curves_are_cut_at_the_same_steps_when_thinned() -> None:
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
