"""Steps to a target, and the curve fitted to them, where the true values are known."""

import math

import numpy as np
import pytest

from merit_lab.study.fit import fit_curve, steps_to_reach

BATCHES = [8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([(0, 5.0), (10, 3.0), (20, 2.0)], 10.0),
        ([(0, 5.0), (10, 3.5), (30, 2.5)], 20.0),
        ([(0, 5.0), (10, 2.0), (20, 4.0)], 10 * 2 / 3),  # the first time counts
        ([(0, 5.0), (10, 3.1)], None),
        ([(0, 5.0), (10, math.nan), (20, 2.0)], 20.0),  # nothing to interpolate from
        ([(0, 2.0), (10, 1.0)], 0.0),
        ([], None),
    ],
)
def test_steps_are_interpolated_between_validations(
    losses: list[tuple[int, float]], expected: float | None
) -> None:
    assert steps_to_reach(3.0, losses) == (None if expected is None else pytest.approx(expected))


def test_exact_steps_recover_the_curve() -> None:
    curve = fit_curve(BATCHES, [100 * (1 + 40 / batch) for batch in BATCHES])
    assert curve is not None
    assert curve.least_steps.value == pytest.approx(100)
    assert curve.critical_batch.value == pytest.approx(40)
    assert curve.steps(40) == pytest.approx(200)
    assert curve.is_determined


@pytest.mark.parametrize(("tried", "noise"), [(2 * BATCHES, 0.08), ([8, 32, 128], 0.01)], ids=["12", "3"])
def test_the_intervals_have_their_nominal_coverage(tried: list[int], noise: float) -> None:
    """Also with few runs, where they are wide."""
    random = np.random.default_rng(0)
    batches = np.array(tried)
    held = {"least_steps": 0, "critical_batch": 0}
    num_trials = 400
    for _ in range(num_trials):
        steps = 100 * (1 + 40 / batches) * np.exp(noise * random.standard_normal(len(batches)))
        curve = fit_curve(batches.tolist(), steps.tolist())
        assert curve is not None
        held["least_steps"] += curve.least_steps.low <= 100 <= curve.least_steps.high
        held["critical_batch"] += curve.critical_batch.low <= 40 <= curve.critical_batch.high
    for count in held.values():
        # 95% ± three standard deviations of a binomial proportion.
        assert abs(count / num_trials - 0.95) < 3 * math.sqrt(0.05 * 0.95 / num_trials)


def test_two_batches_are_too_few() -> None:
    assert fit_curve([8, 8, 16, 16], [100, 101, 60, 61]) is None


def test_without_a_bend_the_critical_batch_is_not_determined() -> None:
    random = np.random.default_rng(1)
    flat = fit_curve(BATCHES, (100 * np.exp(0.05 * random.standard_normal(len(BATCHES)))).tolist())
    assert flat is not None
    assert not flat.is_determined
    ideal = fit_curve(BATCHES, [8000 / batch for batch in BATCHES])
    assert ideal is not None
    assert ideal.critical_batch.value > 100 * max(BATCHES)
