"""Eigenvalues, trace and density against the exact Hessian."""

import math

import numpy as np
import pytest
import torch

from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.measure.curvature.spectrum import (
    hutchinson_trace,
    num_vectors,
    spectral_density,
    top_eigenvalues,
)


def diagonal(values, dtype=torch.float64):
    """A Hessian that is known: diagonal, with the given eigenvalues."""
    values = torch.tensor(values, dtype=dtype)
    x = torch.zeros_like(values, requires_grad=True)
    return Hessian(lambda: [(values * x**2).sum() / 2], [x])


def test_the_largest_eigenvalues_to_any_precision(case):
    found = top_eigenvalues(case.hessian, 4, tolerance=1e-10)
    np.testing.assert_allclose(found["values"], case.eigenvalues[::-1][:4], rtol=1e-10)


def test_the_largest_is_not_the_largest_magnitude():
    found = top_eigenvalues(diagonal([-9.0, -1.0, 1.0, 2.0, 3.0]), 2, tolerance=1e-8)
    np.testing.assert_allclose(found["values"], [3.0, 2.0])


def test_every_eigenvalue_has_its_own_residual(monkeypatch):
    """Of the second vector, which has the larger value, that value is wrong by one."""
    found = np.array([1.0, 5.0]), np.eye(3)[:, :2]
    monkeypatch.setattr("scipy.sparse.linalg.eigsh", lambda *_, **__: found)
    eigenvalues = top_eigenvalues(diagonal([1.0, 4.0, 0.0]), 2)
    assert eigenvalues == {"values": [5.0, 1.0], "residuals": [1.0, 0.0]}


def test_eigenvalues_that_do_not_converge(monkeypatch):
    monkeypatch.setattr("merit_lab.measure.curvature.spectrum._MOST_RESTARTS", 1)
    with pytest.raises(RuntimeError, match=r"of 3 eigenvalues converged to a tolerance of 1e-14 in \d+ prod"):
        top_eigenvalues(diagonal(np.linspace(0, 1, 400).tolist()), 3, tolerance=1e-14)


@pytest.mark.parametrize(
    ("size", "top", "vectors"),
    [(10, 3, 10), (1000, 30, 61), (124_475_904, 5, 17)],  # GPT-2 small: 32 bits cannot number 20
)
def test_vectors_whose_elements_can_be_numbered(size, top, vectors):
    assert num_vectors(size, top) == vectors
    assert size * vectors < 2**31
    with pytest.raises(ValueError, match="request at most"):
        num_vectors(size, size)


def test_the_trace_within_its_error(case):
    trace = hutchinson_trace(case.hessian, 30)
    assert trace["value"] == pytest.approx(np.trace(case.exact), abs=5 * trace["standard_error"])
    assert trace["standard_error"] < abs(trace["value"]) / 5, "a larger one would let anything through"


def test_each_probes_quadrature_is_exact_for_its_moments(case):
    hessian = case.hessian
    spectrum = spectral_density(hessian, 2, steps=4, seed=7)
    generator = torch.Generator().manual_seed(7)
    for place in range(2):
        probe = torch.randn(hessian.size, generator=generator).double().numpy()
        probe /= np.linalg.norm(probe)
        for power in range(8):
            expected = probe @ np.linalg.matrix_power(case.exact, power) @ probe
            found = np.dot(np.power(spectrum["nodes"][place], power), spectrum["weights"][place])
            assert found == pytest.approx(expected, rel=1e-8)


def test_the_density_is_the_spectrum_smoothed(case):
    """More steps than the float32 vectors stay orthogonal for: copies of eigenvalues must do no harm."""
    spectrum = spectral_density(case.quadratic, 12, steps=150)
    grid, density = np.array(spectrum["grid"]), spectrum["density"]
    smallest, largest = spectrum["smallest"], max(map(max, spectrum["nodes"]))
    width = (largest - smallest) / 100
    bells = np.exp(-0.5 * ((grid[:, None] - case.eigenvalues) / width) ** 2)
    exact = bells.mean(axis=1) / (width * math.sqrt(2 * math.pi))
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-5)
    assert np.trapezoid(np.abs(density - exact), grid) < 0.1
    assert largest == pytest.approx(case.eigenvalues[-1], rel=1e-4)
    assert smallest == pytest.approx(case.eigenvalues[0], rel=1e-3)
    assert spectrum["below_zero"] == pytest.approx(np.mean(case.eigenvalues < 0), abs=0.1)


def test_few_eigenvalues_end_the_lanczos_steps():
    spectrum = spectral_density(diagonal([1.0, 1.0, 1.0, 4.0, 4.0]), 50, steps=5)
    for nodes, weights in zip(spectrum["nodes"], spectrum["weights"], strict=True):
        np.testing.assert_allclose(nodes, [1.0, 4.0])
        assert sum(weights) == pytest.approx(1)
    assert np.mean([weights[0] for weights in spectrum["weights"]]) == pytest.approx(0.6, abs=0.15)
