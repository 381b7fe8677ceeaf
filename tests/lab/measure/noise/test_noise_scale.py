"""The noise scale of gradients for which it is known."""

import math

import numpy as np
import pytest

from merit_lab.measure.noise.scale import (
    GradientNorms,
    NoiseScale,
    noise_scale,
    relative_steps,
    relative_tokens,
)


def norms(gradients, micro_batch):
    """Gradients of single sequences, (batches, sequences, size), as micro-batches' norms."""
    batches, _, size = gradients.shape
    means = gradients.reshape(batches, -1, micro_batch, size).mean(axis=2)
    return [GradientNorms((g**2).sum(axis=1).tolist(), (g.mean(axis=0) ** 2).sum()) for g in means]


def gaussian(generator, batches, *, mean, deviations, sequences=32):
    """Gradients with a known mean and a diagonal covariance."""
    return mean + deviations * generator.standard_normal((batches, sequences, len(mean)))


MEAN, DEVIATIONS = np.linspace(-0.3, 0.5, 20), np.linspace(0.1, 2.0, 20)
NOISE, SIGNAL = (DEVIATIONS**2).sum(), (MEAN**2).sum()


@pytest.mark.parametrize("micro_batch", [1, 4, 16])
def test_gaussian_gradients(micro_batch):
    generator = np.random.default_rng(0)
    gradients = gaussian(generator, 500, mean=MEAN, deviations=DEVIATIONS)
    scale = noise_scale(norms(gradients, micro_batch), micro_batch=micro_batch)
    assert scale.noise == pytest.approx(NOISE, rel=0.05)
    assert scale.signal == pytest.approx(SIGNAL, rel=0.2)
    low, high = scale.interval
    assert low < NOISE / SIGNAL < high
    assert low < scale.value < high < 2 * low


def test_the_interval_has_its_nominal_coverage():
    generator = np.random.default_rng(1)
    covered, signals = [], []
    for _ in range(400):
        gradients = gaussian(generator, 12, mean=MEAN, deviations=DEVIATIONS)
        scale = noise_scale(norms(gradients, 4), micro_batch=4)
        covered.append(scale.interval[0] < NOISE / SIGNAL < scale.interval[1])
        signals.append(scale.signal)
    assert 0.88 < np.mean(covered) < 0.99
    error = np.std(signals) / math.sqrt(len(signals))
    assert np.mean(signals) == pytest.approx(SIGNAL, abs=4 * error)  # unbiased


def test_linear_regression():
    """Squared error of w . x for Gaussian x: G = d, noise = |d|^2 (n + 1) + n s^2, d the error of w."""
    generator = np.random.default_rng(2)
    size, spread = 10, 0.7
    error = generator.standard_normal(size) / 2
    x = generator.standard_normal((400, 64, size))
    residuals = x @ error + spread * generator.standard_normal((400, 64))
    scale = noise_scale(norms(x * residuals[..., None], 2), micro_batch=2)
    noise, signal = (error @ error) * (size + 1) + size * spread**2, error @ error
    assert scale.noise == pytest.approx(noise, rel=0.05)
    assert scale.signal == pytest.approx(signal, rel=0.05)
    assert scale.interval[0] < noise / signal < scale.interval[1]


def test_without_a_signal_the_scale_is_not_bounded():
    generator = np.random.default_rng(3)
    gradients = gaussian(generator, 16, mean=np.zeros(20), deviations=DEVIATIONS)
    low, high = noise_scale(norms(gradients, 4), micro_batch=4).interval
    assert 100 < low < high == math.inf
    assert NoiseScale(noise=2.0, signal=-1.0, ratio_error=0.1).value == math.inf
    assert NoiseScale(noise=2.0, signal=-1.0, ratio_error=0.1).interval == (math.inf, math.inf)


def test_the_jackknife_by_hand():
    """Three batches of two micro-batches of 1: noise 2 (small - large), signal 2 large - small."""
    batches = [GradientNorms([3.0, 5.0], 3.0), GradientNorms([6.0, 6.0], 4.0), GradientNorms([5.0, 5.0], 4.0)]
    scale = noise_scale(batches, micro_batch=1)
    assert scale.noise == pytest.approx((2 + 4 + 2) / 3)
    assert scale.signal == pytest.approx((2 + 2 + 3) / 3)
    without = np.array([5 / 6, 5 / 4, 4 / 6])
    assert scale.ratio_error == pytest.approx(math.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum()))


def test_the_cost_of_a_batch():
    assert relative_steps(50, 100) == 3.0
    assert relative_tokens(50, 100) == 1.5


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "gradients of 0 batches"),
        ([GradientNorms([1.0, 2.0], 1.0)], "gradients of 1 batches"),
        ([GradientNorms([1.0], 1.0)] * 2, "a batch of 1 micro-batches"),
        ([GradientNorms([1.0, 1.0], 1.0)] * 2, "estimated as 0; it must be above 0"),
    ],
)
def test_too_few_batches_are_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        noise_scale(batches, micro_batch=1)


def test_nonfinite_gradients_are_refused():
    with pytest.raises(FloatingPointError, match="nan in micro-batches"):
        noise_scale([GradientNorms([math.nan, 1.0], 1.0)] * 2, micro_batch=1)
