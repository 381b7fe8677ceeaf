"""A run started with torch's AdamW continues in the trust-ratio family, and vice versa."""

import copy
from typing import Any

import pytest
import torch
from optimizer_cases import (
    FAMILY,
    HIDDEN,
    assert_same_bits,
    assert_unchanged,
    name_of,
    parameters,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from merit_optim import LAMB, MERIT, SOAP, SOAPMERIT, Lion, MaxLAMB, MuonMERIT, param_groups

# The other classes of the family have other state for hidden matrices, which AdamW cannot exchange.
every_family_class = pytest.mark.parametrize("optimizer_class", FAMILY, ids=name_of)
every_hidden_class = pytest.mark.parametrize("optimizer_class", HIDDEN, ids=name_of)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def groups(params: list[torch.nn.Parameter], **second: Any) -> list[dict[str, Any]]:
    """Two groups, the second with other options."""
    return [{"params": params[:3]}, {"params": params[3:], **second}]


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [
        {key: optimizer.state[p][key] for key in MOMENTS} for g in optimizer.param_groups for p in g["params"]
    ]


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@every_family_class
def test_state_keys_are_those_of_adamw(device, optimizer_class) -> None:
    adamw, ours = torch.optim.AdamW(parameters(device)), optimizer_class(parameters(device))
    for optimizer in (adamw, ours):
        take_steps(optimizer, 1)
    for state, expected in zip(ours.state.values(), adamw.state.values(), strict=True):
        assert set(state) == set(expected) == set(MOMENTS)
        for key in MOMENTS:
            assert (state[key].shape, state[key].dtype) == (expected[key].shape, expected[key].dtype)


@every_hidden_class
def test_adamw_state_of_hidden_matrices_is_refused(device, optimizer_class) -> None:
    optimizer = optimizer_class(parameters(device))
    take_steps(optimizer, 1)
    before = snapshot(optimizer)
    hidden, rest = (
        {"params": [p.detach().clone() for p in group["params"]]} for group in optimizer.param_groups
    )
    adamw = torch.optim.AdamW([hidden, rest])
    take_steps(adamw, 1)
    fits = r"state, \['exp_avg', 'exp_avg_sq', 'step'\], fits .* with direction='adam'"
    message = fits + "; those with '(muon|soap|soap-muon)'"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(adamw.state_dict())
    assert_unchanged(optimizer, before)


@pytest.mark.parametrize("saved_from", [nn.Module.parameters, nn.Module.named_parameters, param_groups])
def test_the_advice_for_adamw_state_of_hidden_matrices_works(saved_from) -> None:
    """Whatever the groups of AdamW: neither grouping anew nor handing all of it over would help."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    model(torch.arange(5)).square().mean().backward()
    adamw = torch.optim.AdamW(saved_from(model))
    adamw.step()
    optimizer = MuonMERIT(param_groups(model))
    with pytest.raises(ValueError, match=r"those with 'muon' need \['momentum_buffer'\] and begin anew"):
        optimizer.load_state_dict(adamw.state_dict())
    groups = [{"params": group["params"], "direction": "adam"} for group in adamw.param_groups]
    loaded = MuonMERIT(groups)
    loaded.load_state_dict(adamw.state_dict())
    for group in optimizer.param_groups:
        if group["direction"] == "adam":
            optimizer.state.update({weight: loaded.state[weight] for weight in group["params"]})
    optimizer.step()
    assert {int(optimizer.state[weight]["step"]) for weight in model[2].parameters()} == {2}
    assert optimizer.state[model[1].weight]["step"] == 1


def test_state_of_another_direction_that_was_handed_over_is_refused_with_a_way_out() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    adamw = torch.optim.AdamW([weight])
    adamw.step()
    optimizer = MuonMERIT([{"params": [weight], "direction": "muon"}])
    optimizer.state.update(adamw.state)
    with pytest.raises(ValueError, match=r"another optimizer's, begin anew: del optimizer\.state\[param\]"):
        optimizer.step()
    del optimizer.state[weight]
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


@every_family_class
def test_adamw_state_is_loaded_and_saved_bit_for_bit(device, optimizer_class) -> None:
    adamw = torch.optim.AdamW(groups(parameters(device)), lr=1e-3)
    take_steps(adamw, 3)
    saved = copy.deepcopy(adamw.state_dict())

    ours = optimizer_class(groups(parameters(device)), lr=0.02)
    ours.load_state_dict(saved)
    assert_same_bits(moments(ours), moments(adamw))

    back = torch.optim.AdamW(groups(parameters(device)), lr=1e-3)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert_same_bits(moments(back), moments(adamw))


@every_family_class
def test_options_stay_those_of_the_loading_optimizer(device, optimizer_class) -> None:
    adamw = torch.optim.AdamW(groups(parameters(device)), lr=1e-3, betas=(0.5, 0.6), weight_decay=0.7)
    take_steps(adamw, 2)
    ours = optimizer_class(groups(parameters(device), lr=0.5, clip=0.25), lr=0.02, betas=(0.8, 0.9))
    before = options(ours)
    ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert options(ours) == before
    assert [group["lr"] for group in ours.param_groups] == [0.02, 0.5]
    assert ours.param_groups[1]["clip"] == 0.25


def test_the_next_step_uses_the_loaded_moments(device) -> None:
    """As if MERIT's state had been set to AdamW's moments by hand."""
    adamw = torch.optim.AdamW(parameters(device))
    take_steps(adamw, 3)
    loaded, by_hand = (MERIT(parameters(device), bias_correction=True) for _ in range(2))
    loaded.load_state_dict(copy.deepcopy(adamw.state_dict()))
    pairs = zip(by_hand.param_groups[0]["params"], adamw.param_groups[0]["params"], strict=True)
    for param, source in pairs:
        by_hand.state[param] = {key: x.clone() for key, x in adamw.state[source].items()}
    for optimizer in (loaded, by_hand):
        set_gradients(optimizer.param_groups[0]["params"], 3)
        optimizer.step()
    assert_same_bits(snapshot(loaded), snapshot(by_hand))
    fresh = MERIT(parameters(device), bias_correction=True)
    take_steps(fresh, 1, first=3)
    assert not torch.equal(snapshot(fresh)[0][0], snapshot(loaded)[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_moments_of_adamw_become_float32(device, dtype) -> None:
    adamw = torch.optim.AdamW(parameters(device, dtype))
    take_steps(adamw, 2)
    merit = MERIT(parameters(device, dtype))
    merit.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for ours, theirs in zip(moments(merit), moments(adamw), strict=True):
        assert_same_bits(ours["exp_avg"], theirs["exp_avg"].float())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}])
def test_adamw_with_its_step_count_on_the_gpu_is_loaded_too(options) -> None:
    adamw = torch.optim.AdamW(parameters("cuda"), **options)
    take_steps(adamw, 2)
    merit = MERIT(parameters("cuda"))
    merit.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert_same_bits(moments(merit), moments(adamw))
    take_steps(merit, 1, first=2)
    assert {state["step"].item() for state in merit.state.values()} == {3.0}


def test_unused_state_of_another_optimizer_is_dropped(device) -> None:
    adamw = torch.optim.AdamW(parameters(device), amsgrad=True)
    take_steps(adamw, 2)
    lion = Lion(parameters(device))
    lion.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert {key for state in lion.state.values() for key in state} == {"step", "exp_avg"}
    lion.state[lion.param_groups[0]["params"][0]]["extra"] = torch.ones(1)
    again = Lion(parameters(device))
    again.load_state_dict(copy.deepcopy(lion.state_dict()))
    assert "extra" in again.state[again.param_groups[0]["params"][0]]


@pytest.mark.parametrize("optimizer_class", [MERIT, LAMB, MaxLAMB, Lion], ids=name_of)
def test_moments_in_another_basis_are_refused(optimizer_class) -> None:
    """SOAP's have the names and shapes of Adam's; SOAPMERIT can use them."""
    weight = nn.Parameter(torch.randn(4, 3))
    groups = [{"params": [weight], "direction": "soap"}]
    soap = SOAP(groups)
    for _ in range(2):
        weight.grad = torch.randn(4, 3)
        soap.step()
    saved = copy.deepcopy(soap.state_dict())
    with pytest.raises(ValueError, match="SOAP's eigenbasis"):
        optimizer_class([weight]).load_state_dict(saved)
    SOAPMERIT(groups).load_state_dict(saved)
    soap.param_groups[0]["direction"] = "adam"
    with pytest.raises(ValueError, match="SOAP's eigenbasis"):
        soap.step()


SCHEDULES = {
    "linear": (lambda o: LinearLR(o, 0.1, 0.0, total_iters=20), 22),
    "one cycle": (lambda o: OneCycleLR(o, 4e-2, total_steps=20, anneal_strategy="linear"), 20),
}


@pytest.mark.parametrize(("schedule", "num_steps"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_may_end_just_below_zero(schedule, num_steps) -> None:
    """By rounding, or with its last call; its last checkpoint can be loaded."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = MERIT([weight], lr=4e-2)
    scheduler = schedule(optimizer)
    for _ in range(num_steps):
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] < 0
    MERIT([weight]).load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_another_number_of_groups_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adamw.step()
    optimizer = MERIT(param_groups(model))
    message = r"different number of parameter groups: of 4 parameters, and this MERIT of 2, 2\. Load"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(adamw.state_dict())
    assert not optimizer.state
