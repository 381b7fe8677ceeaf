"""State dicts whose parameters have names are loaded by name, where torch goes by positions."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from optimizer_cases import assert_same_bits, assert_unchanged, random_tensor, snapshot
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from merit_optim import MERIT

# Three are of one shape, so that state in another order would fit.
SHAPES = {"a": (3, 4), "b": (3, 4), "c": (3, 4), "d": (4,)}
Groups = Sequence[str]
"""The names of each group: "ab" has a and b."""


class Model(nn.Module):
    """These parameters, in alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        for seed, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(random_tensor(shape, seed)))


def built(model: Model, groups: Groups, prefix: str = "") -> MERIT:
    """An optimizer with these groups, each with its weight decay."""
    return MERIT(
        [
            {
                "params": [(prefix + name, model.get_parameter(name)) for name in names],
                "weight_decay": 0.1 * ("d" in names),
            }
            for names in groups
        ]
    )


def train(model: Model, optimizer: Optimizer, first: int = 0) -> None:
    for step in range(first, first + 3):
        for i, param in enumerate(model.parameters()):
            param.grad = random_tensor(param.shape, 100 + 10 * step + i)
        optimizer.step()


def saved(groups: Groups, prefix: str = "") -> tuple[Model, MERIT]:
    """A model and its optimizer after some steps."""
    model = Model()
    optimizer = built(model, groups, prefix)
    train(model, optimizer)
    return model, optimizer


def names_of(optimizer: Optimizer) -> list[str]:
    return ["".join(group["param_names"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("other", [["cdab"], ["badc"]])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_another_order_of_parameters_continues_equally(other: Groups, prefix: str) -> None:
    model, optimizer = saved(["abcd"], prefix)
    copied = copy.deepcopy(model)
    again = built(copied, other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert names_of(again) == other
    for name, param in copied.named_parameters():
        assert_same_bits(again.state[param], optimizer.state[model.get_parameter(name)])
    train(model, optimizer, first=3)
    train(copied, again, first=3)
    assert_same_bits(list(copied.parameters()), list(model.parameters()))


def test_another_order_of_groups_takes_their_options_along() -> None:
    model, optimizer = saved(["ab", "cd"])
    copied = copy.deepcopy(model)
    again = built(copied, ["dc", "ba"])
    for group in again.param_groups:
        group["weight_decay"] = 0.5
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["weight_decay"] for group in again.param_groups] == [0.1, 0.0]
    train(model, optimizer, first=3)
    train(copied, again, first=3)
    assert_same_bits(list(copied.parameters()), list(model.parameters()))


def test_other_groups_are_refused() -> None:
    _, optimizer = saved(["ab", "cd"])
    again = built(Model(), ["ac", "bd"])
    before = snapshot(again)
    with pytest.raises(ValueError, match=r"in other groups: none has exactly the 2 of group 0 \(a, c"):
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_unchanged(again, before)


@pytest.mark.parametrize("prefix", ["module.", "renamed."])
def test_other_names_are_loaded_by_position(prefix: str) -> None:
    """As in torch: a model that is wrapped, or was renamed, has the same parameters."""
    model, optimizer = saved(["abcd"], prefix)
    again_model = Model()
    again = built(again_model, ["abcd"])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for now, before in zip(again_model.parameters(), model.parameters(), strict=True):
        assert_same_bits(again.state[now], optimizer.state[before])


def test_names_that_are_not_unique_are_loaded_by_position() -> None:
    params = [nn.Parameter(random_tensor((2, 3), seed)) for seed in range(4)]
    groups: list[dict[str, Any]] = [
        {"params": [("weight", params[0]), ("bias", params[1])]},
        {"params": [("bias", params[2]), ("weight", params[3])]},
    ]
    optimizer = MERIT(groups)
    for seed, param in enumerate(params):
        param.grad = random_tensor(param.shape, 10 + seed)
    optimizer.step()
    again = MERIT([{"params": list(group["params"])} for group in groups])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_bits([again.state[p] for p in params], [optimizer.state[p] for p in params])


def test_state_that_torch_has_put_in_order_keeps_it() -> None:
    """torch.distributed.checkpoint goes by name, and copies the names as they were saved."""
    model, optimizer = saved(["abcd"])
    copied = copy.deepcopy(model)
    again = built(copied, ["cdab"])
    set_optimizer_state_dict(copied, again, get_optimizer_state_dict(model, optimizer))
    assert names_of(again) == ["cdab"]
    for name, param in copied.named_parameters():
        assert_same_bits(again.state[param], optimizer.state[model.get_parameter(name)])
