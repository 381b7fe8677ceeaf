"""A run started with version 0.1 continues: its state is loaded, and further steps are the same.

``data/states_0_1.pt`` was written by that version. For each of its optimizers it has the weights and the
state after 3 steps of ``take_steps`` over a weight of (5, 7) and a bias of (7,) with a learning rate of 1e-2,
and the weights after 2 more.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import name_of, parameter, take_steps
from torch import Tensor
from torch.optim import Optimizer

from merit_optim import LAMB, MERIT, Lion, MaxLAMB, SophiaG

every_class_of_0_1 = pytest.mark.parametrize(
    "optimizer_class", [MERIT, LAMB, MaxLAMB, Lion, SophiaG], ids=name_of
)


@pytest.fixture
def saved(optimizer_class) -> dict[str, Any]:
    """The content of the file, loaded with ``weights_only``."""
    of_all = torch.load(Path(__file__).parent / "data" / "states_0_1.pt", weights_only=True)
    return of_all[optimizer_class.__name__]


def built(optimizer_class: type[Optimizer], lr: float) -> tuple[list[Tensor], Optimizer]:
    """The initial parameters, and their optimizer."""
    weight, bias = parameter((5, 7), 0, scale=0.3), parameter((7,), 1, scale=0.3)
    return [weight, bias], optimizer_class([("weight", weight), ("bias", bias)], lr=lr)


def assert_near(params: list[Tensor], expected: list[Tensor]) -> None:
    """Up to the rounding of another machine."""
    torch.testing.assert_close([p.detach() for p in params], expected, rtol=1e-6, atol=1e-8)


@every_class_of_0_1
def test_a_state_saved_by_0_1_continues(optimizer_class, saved) -> None:
    params, optimizer = built(optimizer_class, lr=0.5)
    with torch.no_grad():
        for param, weight in zip(params, saved["weights"], strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved["state_dict"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert [state["step"].item() for state in optimizer.state.values()] == [3, 3]
    take_steps(optimizer, 2, first=3)
    assert_near(params, saved["after"])


@every_class_of_0_1
def test_the_steps_are_those_of_0_1(optimizer_class, saved) -> None:
    params, optimizer = built(optimizer_class, lr=1e-2)
    take_steps(optimizer, 3)
    assert_near(params, saved["weights"])
    take_steps(optimizer, 2, first=3)
    assert_near(params, saved["after"])


@every_class_of_0_1
def test_groups_and_states_have_the_keys_of_0_1(optimizer_class, saved) -> None:
    """A distributed checkpoint is loaded by its keys: missing or new keys are errors."""
    _, optimizer = built(optimizer_class, lr=1e-2)
    take_steps(optimizer, 3)
    now, before = optimizer.state_dict(), saved["state_dict"]
    assert now["param_groups"] == before["param_groups"]
    keys = [{i: state.keys() for i, state in x["state"].items()} for x in (now, before)]
    assert keys[0] == keys[1]
