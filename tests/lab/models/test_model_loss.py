"""The cross-entropy by chunks against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from merit_lab.models.loss import linear_cross_entropy, loss_and_gradients

ROWS, WIDTH, CLASSES = 37, 12, 50


def make(dtype=torch.float32, weight_dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, WIDTH, dtype=dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, dtype=weight_dtype).requires_grad_()
    return inputs, weight, torch.randint(CLASSES, (ROWS,))


def plain(inputs, weight, targets) -> torch.Tensor:
    return F.cross_entropy(inputs @ weight.T.to(inputs.dtype), targets)


@pytest.mark.parametrize("chunk", [0, 1, 8, ROWS, 1000])
@pytest.mark.parametrize("scale", [1, 1e4])
def test_loss_and_gradients_are_the_plain_ones(chunk, scale) -> None:
    """Also of logits so wide that their exponentials are infinite."""
    inputs, weight, targets = make(torch.float64, torch.float64)
    inputs = (scale * inputs.detach()).requires_grad_()
    expected = torch.autograd.grad(3 * plain(inputs, weight, targets), (inputs, weight))
    loss = linear_cross_entropy(inputs, weight, targets, chunk=chunk)
    found = torch.autograd.grad(3 * loss, (inputs, weight))
    torch.testing.assert_close(loss, plain(inputs, weight, targets))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [1, 1000])
def test_gradients_in_bf16_are_as_near_as_bf16_allows(chunk) -> None:
    inputs, weight, targets = make(torch.bfloat16)
    expected = torch.autograd.grad(
        plain(inputs.double(), weight.bfloat16().double(), targets), (inputs, weight)
    )
    loss = linear_cross_entropy(inputs, weight, targets, chunk=chunk)
    found = torch.autograd.grad(loss, (inputs, weight))
    assert loss.dtype == torch.float32
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32]
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() < 0.01 * b.double().norm()


def test_many_chunks_add_up_in_float32() -> None:
    """In bf16 the sum of 500 products would be off by 10%."""
    inputs, weight, _ = make(torch.bfloat16)
    inputs, targets = inputs.detach().repeat(40, 1)[:1000], torch.zeros(1000, dtype=torch.int64)
    (expected,) = torch.autograd.grad(plain(inputs.double(), weight.bfloat16().double(), targets), weight)
    (found,) = torch.autograd.grad(linear_cross_entropy(inputs, weight, targets, chunk=2), weight)
    assert (found - expected).norm() < 0.005 * expected.norm()


def test_without_gradients_the_loss_is_the_same_and_nothing_else_is_formed() -> None:
    inputs, weight, targets = make()
    with_gradient = linear_cross_entropy(inputs, weight, targets, chunk=8)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        without = linear_cross_entropy(inputs, weight, targets, chunk=8)
    assert counter.get_total_flops() == 2 * ROWS * WIDTH * CLASSES
    torch.testing.assert_close(without, with_gradient)


def test_a_second_derivative_by_chunks_is_refused_and_the_plain_one_is_right() -> None:
    inputs, weight, targets = make()
    loss = linear_cross_entropy(inputs, weight, targets, chunk=8)
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice.*attention='math'"):
        torch.autograd.grad(loss, weight, create_graph=True)
    loss = linear_cross_entropy(inputs, weight, targets, chunk=0)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), weight)[0].abs().max() > 0


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("gradients", [True, False])
def test_no_more_logits_than_one_chunks_are_ever_held(gradients) -> None:
    inputs, weight, targets = make()
    with torch.no_grad(), LargestTensor() as largest:
        if gradients:
            loss_and_gradients(inputs, weight, targets, chunk=15, fused=False)
        else:
            linear_cross_entropy(inputs, weight, targets, chunk=15)
    assert largest.num_elements == 15 * CLASSES < ROWS * CLASSES
