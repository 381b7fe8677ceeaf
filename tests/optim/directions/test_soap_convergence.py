"""SOAP where the eigendecomposition does not converge: the step is taken nevertheless."""

from typing import Any

import torch
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor

from merit_optim import SOAP
from merit_optim.optim import algorithm
from merit_optim.optim.axes.directions import Soap
from merit_optim.optim.matrices import View
from merit_optim.optim.spec import Spec

SHAPE = (2, 5, 5)  # no null space, whose eigenvectors are arbitrary
eigh = torch.linalg.eigh


def fail_for(*dtypes: torch.dtype) -> Any:
    """An eigendecomposition that does not converge in these dtypes."""

    def failing(x: Tensor) -> Any:
        if x.dtype in dtypes:
            raise torch.linalg.LinAlgError("linalg.eigh: (Batch element 1): The algorithm failed to converge")
        return eigh(x)

    return failing


def trained(num_steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight and its state after some steps, checked against the definition."""
    param = random_tensor(SHAPE, 0)
    weight = param.clone()
    options = {"precondition_frequency": 2, "refresh_phase": 0, "matrix_dims": 2}
    optimizer = SOAP([{"params": [param], "direction": "soap"}], lr=0.1, weight_decay=0.0, **options)
    direction = Soap(precondition_frequency=2)
    shapes = direction.shapes(View(2).matrices(SHAPE), View(2))
    state = tuple(torch.zeros(SHAPE if shape is None else shape) for shape in shapes)
    for step in range(1, num_steps + 1):
        param.grad = random_tensor(SHAPE, step)
        weight, state = algorithm.step(
            weight,
            param.grad,
            state,
            spec=Spec(direction=direction, view=View(2)),
            lr=0.1,
            weight_decay=0.0,
            step=step,
        )
        optimizer.step()
    kept = {key: optimizer.state[param][key] for key in direction.keys}
    assert_same_bits([param, *kept.values()], [weight, *state])
    return param, kept


def test_it_is_repeated_in_float64(monkeypatch) -> None:
    expected, _ = trained(4)
    monkeypatch.setattr(torch.linalg, "eigh", fail_for(torch.float32))
    param, state = trained(4)
    assert state["row_basis"].dtype == torch.float32
    torch.testing.assert_close(param, expected, rtol=0, atol=1e-3)


def test_nothing_is_rotated_until_the_basis_is_improved_if_that_fails_too(monkeypatch) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", fail_for(torch.float32, torch.float64))
    _, state = trained(1)
    assert torch.equal(state["row_basis"], torch.eye(5).expand(2, 5, 5))
    assert torch.equal(state["column_basis"], torch.eye(5).expand(2, 5, 5))
    param, state = trained(6)
    assert param.isfinite().all()
    assert not torch.equal(param, random_tensor(SHAPE, 0))
    for basis in (state["row_basis"], state["column_basis"]):
        eye = torch.eye(basis.shape[-1]).expand_as(basis)
        assert not torch.allclose(basis, eye, atol=1e-2)
        torch.testing.assert_close(basis.mT @ basis, eye, rtol=0, atol=1e-5)
