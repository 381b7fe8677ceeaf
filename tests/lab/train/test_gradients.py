"""Norms of gradients and weights, and what ranks make of numbers that are not finite."""

import pytest
import torch
import torch.distributed as dist

from merit_lab.train.parallel import Ranks
from merit_lab.train.steps import gradient_norms, weight_norm

ALONE = Ranks(0, 1, torch.device("cpu"))


def test_norms_of_many_elements_are_exact():
    """torch's own add squares one after another on CPUs, and are off by 0.7% here."""
    weight = torch.nn.Parameter(torch.full((2048, 2048), 0.1))
    weight.grad = torch.full_like(weight, 0.3)
    assert gradient_norms([weight], ALONE).item() == pytest.approx(0.3 * 2048, rel=1e-4)
    assert weight_norm([weight], ALONE).item() == pytest.approx(0.1 * 2048, rel=1e-4)


def without_nan(x):
    return torch.where(x.isnan(), 0, x)


@pytest.mark.parametrize("flip", [False, True])
def test_the_largest_over_ranks_keeps_a_nan_of_either(flip, monkeypatch):
    here, there = torch.tensor([torch.nan, 2.0]), torch.tensor([1.0, 5.0])
    if flip:
        here, there = there, here

    def reduce(tensor, operation):
        """With the rank that has ``there``. Some backends' maximum drops a NaN, as fmax does."""
        if operation == dist.ReduceOp.SUM:
            tensor += there - without_nan(there)
        else:
            tensor.copy_(torch.fmax(tensor, there))

    monkeypatch.setattr(dist, "all_reduce", reduce)
    largest = Ranks(0, 2, torch.device("cpu")).largest(here)
    assert largest[0].isnan()
    assert largest[1] == 5.0
