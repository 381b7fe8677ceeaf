"""Eigenvalues, trace and density against the exact Hessian."""

import math

import numpy as np
import pytest
import torch

from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.measure.curvature.spectrum import (
    Spectrum,
    hutchinson_trace,
    num_vectors,
    smooth,
    spectral_density,
    top_eigenvalues,
)


def diagonal(values, dtype=torch.float64):
    """A Hessian that is known: diagonal, with the given eigenvalues."""
    values = torch.tensor(values, dtype=dtype)
    x = torch.zeros_like(values, requires_grad=True)
    return Hessian(lambda: [(values * x**2).sum() / 2], [x])


def moments(spectrum: Spectrum, power: int) -> np.ndarray:
    """The mean of ``eigenvalue ** power`` for each probe."""
    pairs = zip(spectrum.nodes, spectrum.weights, strict=True)
    return np.array([np.dot(np.power(nodes, power), weights) for nodes, weights in pairs])


def test_the_largest_eigenvalues(case):
    found = top_eigenvalues(case.hessian, 4)
    exact = case.eigenvalues[::-1][:4]
    np.testing.assert_allclose(found.values, exact, rtol=1e-4)
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert np.abs(case.eigenvalues - value).min() <= residual + 1e-5 * exact[0]
        assert residual < 2e-3 * value


def test_the_largest_eigenvalues_to_any_precision(exact_case):
    found = top_eigenvalues(exact_case.hessian, 4, tolerance=1e-10)
    np.testing.assert_allclose(found.values, exact_case.eigenvalues[::-1][:4], rtol=1e-10)


def test_the_largest_is_not_the_largest_magnitude():
    found = top_eigenvalues(diagonal([-9.0, -1.0, 1.0, 2.0, 3.0]), 2, tolerance=1e-8)
    np.testing.assert_allclose(found.values, [3.0, 2.0])


def test_every_eigenvalue_has_its_own_residual(monkeypatch):
    """Of the second vector, which has the larger value, that value is wrong by one."""
    found = np.array([1.0, 5.0]), np.eye(3)[:, :2]
    monkeypatch.setattr("scipy.sparse.linalg.eigsh", lambda *_, **__: found)
    eigenvalues = top_eigenvalues(diagonal([1.0, 4.0, 0.0]), 2)
    assert eigenvalues.values == [5.0, 1.0]
    assert eigenvalues.residuals == [1.0, 0.0]


def test_eigenvalues_that_do_not_converge(monkeypatch):
    monkeypatch.setattr("merit_lab.measure.curvature.spectrum._MOST_RESTARTS", 1)
    with pytest.raises(RuntimeError, match=r"of 3 eigenvalues converged to a tolerance of 1e-14 in \d+ prod"):
        top_eigenvalues(diagonal(np.linspace(0, 1, 400).tolist()), 3, tolerance=1e-14)


@pytest.mark.parametrize(
    ("size", "top", "vectors"),
    [
        (10, 3, 10),
        (1000, 5, 20),
        (1000, 30, 61),
        (124_475_904, 5, 17),  # GPT-2 small: 20 would be more elements than 32 bits number
        (774_090_240, 0, 2),
    ],
)
def test_vectors_whose_elements_can_be_numbered(size, top, vectors):
    assert num_vectors(size, top) == vectors
    assert size * vectors < 2**31


def test_a_model_too_large_for_as_many_eigenvalues():
    with pytest.raises(ValueError, match="can index the elements of only 6; request at most 4"):
        num_vectors(354_871_296, 5)


def test_the_trace_within_its_error(case, within):
    trace = hutchinson_trace(case.hessian, 30)
    within(trace.samples, np.trace(case.exact))
    assert trace.value == pytest.approx(np.mean(trace.samples))


def test_the_traces_error_is_that_of_theory(exact_case):
    """The variance of a sample is twice the sum of the squares beside the diagonal."""
    trace = hutchinson_trace(exact_case.quadratic, 400, seed=1)
    beside = exact_case.exact - np.diag(np.diag(exact_case.exact))
    theory = math.sqrt(2 * (beside**2).sum() / 400)
    assert trace.standard_error == pytest.approx(theory, rel=0.2)


def test_the_trace_of_a_diagonal_is_exact():
    assert hutchinson_trace(diagonal([1.0, -2.0, 5.0]), 2).samples == [4.0, 4.0]


def test_the_trace_follows_from_the_seed(case):
    assert hutchinson_trace(case.hessian, 2, seed=5) == hutchinson_trace(case.hessian, 2, seed=5)
    assert hutchinson_trace(case.hessian, 2, seed=5) != hutchinson_trace(case.hessian, 2, seed=6)


def test_the_densitys_moments(case, within):
    """Mean and mean square of the eigenvalues, by as many steps as leave them exact for each probe."""
    spectrum = spectral_density(case.quadratic, 200, steps=2)
    size = case.hessian.size
    within(moments(spectrum, 1), np.trace(case.exact) / size)
    within(moments(spectrum, 2), (case.exact**2).sum() / size)


def test_each_probes_quadrature_is_exact_for_its_moments(exact_case):
    hessian = exact_case.hessian
    spectrum = spectral_density(hessian, 2, steps=4, seed=7)
    generator = torch.Generator().manual_seed(7)
    for place in range(2):
        probe = torch.randn(hessian.size, generator=generator).double().numpy()
        probe /= np.linalg.norm(probe)
        for power in range(8):
            expected = probe @ np.linalg.matrix_power(exact_case.exact, power) @ probe
            assert moments(spectrum, power)[place] == pytest.approx(expected, rel=1e-8)


def test_the_density_is_the_spectrum_smoothed(case):
    """More steps than the float32 vectors stay orthogonal for: copies of eigenvalues must do no harm."""
    spectrum = spectral_density(case.quadratic, 12, steps=150)
    grid, density = smooth(spectrum)
    nodes = np.concatenate(spectrum.nodes)
    width = (nodes.max() - nodes.min()) / 100
    bells = np.exp(-0.5 * ((grid[:, None] - case.eigenvalues) / width) ** 2) / (
        width * math.sqrt(2 * math.pi)
    )
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-5)
    assert np.trapezoid(np.abs(density - bells.mean(axis=1)), grid) < 0.1
    assert max(map(max, spectrum.nodes)) == pytest.approx(case.eigenvalues[-1], rel=1e-4)
    assert min(map(min, spectrum.nodes)) == pytest.approx(case.eigenvalues[0], rel=1e-3)


def test_few_eigenvalues_end_the_lanczos_steps():
    spectrum = spectral_density(diagonal([1.0, 1.0, 1.0, 4.0, 4.0]), 50, steps=5)
    for nodes, weights in zip(spectrum.nodes, spectrum.weights, strict=True):
        np.testing.assert_allclose(nodes, [1.0, 4.0])
        assert sum(weights) == pytest.approx(1)
    assert np.mean([weights[0] for weights in spectrum.weights]) == pytest.approx(0.6, abs=0.15)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_spectrum_of_one_eigenvalue(value):
    spectrum = spectral_density(diagonal([value] * 4), 2, steps=4)
    grid, density = smooth(spectrum)
    assert spectrum.nodes == [[pytest.approx(value)]] * 2
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-5)


def test_smoothing_by_hand():
    grid, density = smooth(Spectrum([[0.0, 10.0], [0.0]], [[0.5, 0.5], [1.0]]))
    assert np.interp(0.0, grid, density) == pytest.approx(0.75 / (0.1 * math.sqrt(2 * math.pi)), rel=5e-3)
    assert np.interp(10.0, grid, density) == pytest.approx(0.25 / (0.1 * math.sqrt(2 * math.pi)), rel=5e-3)


@pytest.mark.parametrize(
    ("measure", "complaint"),
    [
        (
            lambda hessian: top_eigenvalues(hessian, 0),
            "top is 0; it must be from 1 to below the 3 parameters",
        ),
        (
            lambda hessian: top_eigenvalues(hessian, 3),
            "top is 3; it must be from 1 to below the 3 parameters",
        ),
        (lambda hessian: hutchinson_trace(hessian, 1), "probes is 1"),
        (lambda hessian: spectral_density(hessian, 0, steps=1), "probes is 0; it must be a whole number"),
        (lambda hessian: spectral_density(hessian, 1, steps=0), "steps is 0; it must be a whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused(measure, complaint):
    with pytest.raises(ValueError, match=complaint):
        measure(diagonal([1.0, 2.0, 3.0]))
