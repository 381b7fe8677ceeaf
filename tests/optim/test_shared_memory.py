"""Parameters and names that other code has changed: shared memory, lists of other lengths."""

import pytest
import torch
from torch import nn

from merit_optim import MERIT, param_groups


@pytest.mark.parametrize("options", [{}, {"ratio": "none"}, {"element_wise": False}], ids=str)
def test_two_parameters_of_one_memory_are_both_updated(options) -> None:
    """As in torch. Small weights are copied into stacks, and of two copies one would be lost."""
    results = []
    for foreach in (None, False):
        first, second = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.zeros(4, 4))
        second.data = first.data
        optimizer = MERIT([first, second], lr=0.1, foreach=foreach, **options)
        first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4)
        optimizer.step()
        results.append(first.detach().clone())
    assert torch.equal(*results)


def test_parameters_without_names_of_their_own_are_called_by_their_place() -> None:
    """Some libraries change a group's list of parameters, and not that of their names."""
    optimizer = MERIT(param_groups(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), nonfinite="raise")
    added = nn.Parameter(torch.ones(4, 4))
    optimizer.param_groups[0]["params"].append(added)
    added.grad = torch.ones(4, 4)
    optimizer.step()
    added.grad[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="parameter 2 of group 0"):
        optimizer.step()
