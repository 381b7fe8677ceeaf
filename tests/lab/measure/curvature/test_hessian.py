import weakref

import numpy as np
import pytest
import torch

from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.models import ModelConfig, build


def test_products_are_the_exact_hessians_times_the_vectors(case):
    vectors = torch.randn(3, case.hessian.size, dtype=torch.float64)
    for vector in vectors:
        product = case.hessian @ vector
        np.testing.assert_allclose(product.numpy(), case.exact @ vector.numpy(), atol=1e-12)
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_one_graph_at_a_time():
    """The next part is asked for when the tensors of the one before are gone."""
    weight = torch.randn(4, requires_grad=True)
    alive = []

    def losses():
        for _ in range(3):
            assert not any(reference() is not None for reference in alive)
            middle = weight.exp()
            alive.append(weakref.ref(middle))
            loss = (middle**2).sum()
            del middle
            yield loss
            del loss

    _ = Hessian(losses, [weight]) @ torch.ones(4)
    assert len(alive) == 3


def test_parameters_that_enter_linearly_or_not_at_all():
    x, linear, unused = (torch.tensor([2.0], requires_grad=True) for _ in range(3))
    hessian = Hessian(lambda: [x.pow(2).sum() + linear.sum()], [x, linear, unused])
    assert (hessian @ torch.ones(3)).tolist() == [2.0, 0.0, 0.0]
    hessian = Hessian(lambda: [linear.sum()], [linear])
    assert (hessian @ torch.ones(1)).tolist() == [0.0]


def test_a_product_that_is_not_finite_is_an_error_that_says_so():
    model = build(ModelConfig(width=8, heads=2, layers=1, context=8, vocab_size=12, attention="math"))
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    hessian = Hessian(lambda: [model(tokens, tokens).loss], model.parameters())
    with pytest.raises(FloatingPointError, match=r"not finite, and the loss is nan; .* earlier checkpoint"):
        _ = hessian @ torch.ones(hessian.size)


def test_a_loss_without_a_second_derivative_is_refused_by_the_model():
    model = build(ModelConfig(width=8, heads=2, layers=1, context=8, vocab_size=12))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    hessian = Hessian(lambda: [model(tokens, tokens).loss], model.parameters())
    with pytest.raises(RuntimeError, match="attention='math'"):
        _ = hessian @ torch.ones(hessian.size)
