"""The experimental variant of MERIT, against MERIT itself."""

import torch

from merit_lab.paper.merit_variant import MERITVariant
from merit_optim import MERIT


def trained(make, num_steps=6, shape=(12, 8)):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.ones(8))]
    optimizer = make(weights)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_by_default_it_is_merit():
    expected = trained(lambda weights: MERIT(weights, lr=0.1))
    for rows in (None, 12):
        actual = trained(lambda weights, rows=rows: MERITVariant(weights, lr=0.1, rows=rows))
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_blocks_of_rows_act_as_separate_weights():
    stacked = trained(lambda weights: MERIT(weights, lr=0.1, matrix_dims=2), shape=(3, 4, 8))
    actual = trained(lambda weights: MERITVariant(weights, lr=0.1, rows=4))
    torch.testing.assert_close(actual[0], stacked[0].flatten(0, 1))
    torch.testing.assert_close(actual[1], stacked[1])
    whole = trained(lambda weights: MERITVariant(weights, lr=0.1))
    assert not torch.equal(actual[0], whole[0])


def test_the_smoothed_norms_are_moving_averages():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = MERITVariant([weight], lr=0.0, weight_decay=1.0, eps=1.0, betas=(0.0, 0.0), smoothing=0.75)
    for gradient, expected in ((0.0, 1.0), (1.0, 1.125), (1.0, 1.21875)):
        weight.grad = torch.full((2, 2), gradient)
        optimizer.step()  # the update is g / (|g| + 1) + w: 1, then 1.5
        for name in ("rows_NR", "columns_NC", "whole_N"):
            assert (optimizer.state[weight][name] == expected).all()
