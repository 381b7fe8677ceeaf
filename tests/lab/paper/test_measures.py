"""Formulas of figure 3, figure 10 and theorem 1."""

import polars as pl
import pytest
import torch

from merit_lab.paper import measured, theorem
from merit_lab.paper.records import Data


def test_how_alike_rows_and_columns_are() -> None:
    noise = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(1, 201).float()[:, None].expand(200, 100)
    for kind, of_rows in (("rows", (200 * 100 - 1) / 199), ("columns", 0.0)):
        assert measured.alikeness(noise, kind) == pytest.approx(1.0, abs=0.4)
        assert measured.alikeness(rows, kind) == pytest.approx(of_rows)


def test_the_gap_between_norms_of_normal_numbers() -> None:
    assert measured.relative_gap(torch.tensor([[3.0, -4.0]])) == pytest.approx(0.2)
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    gap = measured.relative_gap(noise)
    assert gap == pytest.approx(0.943, abs=0.01)
    assert measured.peak(gap, noise.numel()) == pytest.approx(1.0, abs=0.15)


def test_the_problem_of_the_theorem() -> None:
    x = torch.linspace(-3, 3, 2001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((x * x / (1 + x * x)).sum(), x)
    assert torch.allclose(theorem.gradient(x.detach()), slope)
    assert slope.abs().max() <= theorem._LARGEST_SLOPE * (1 + 1e-6)
    assert (torch.diff(slope) / torch.diff(x.detach())).abs().max() <= theorem._LIPSCHITZ
    points = pl.DataFrame({"seed": 3, "steps": [1.0, 4.0, 16.0], "measured": [8.0, 4.0, 2.0]})
    assert theorem.exponents(Data(points)) == {3: pytest.approx(-0.5)}
    assert theorem.bound(400) == pytest.approx(theorem.bound(100) / 2)
    for steps in theorem.STEPS:
        _, sizes = theorem.descend(steps)
        assert theorem.WEIGHTS_WITHIN[0] <= sizes.min() <= sizes.max() <= theorem.WEIGHTS_WITHIN[1]
