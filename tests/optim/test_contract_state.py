"""Copies, pickles and checkpoints of an optimizer continue bit for bit."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optimizer_cases import (
    CASES,
    OWN_CASES,
    Case,
    arguments,
    assert_same_bits,
    default_dtype,
    is_soap,
    name_of,
    parameters,
    params_of,
    set_gradients,
    snapshot,
    take_steps,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from merit_optim import LAMB, MERIT

every_case = pytest.mark.parametrize("case", CASES, ids=name_of)
every_own_case = pytest.mark.parametrize("case", OWN_CASES, ids=name_of)
HALF = [torch.bfloat16, torch.float16]


def through_a_file(saved: Any) -> Any:
    """Save and load with ``weights_only``, which runs no code."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_continue_equally(optimizer: Optimizer, other: Optimizer, first: int = 3) -> None:
    """Both continue with the same steps, and neither changes the other's tensors."""
    take_steps(optimizer, 3, first=first)
    take_steps(other, 3, first=first)
    assert_same_bits(snapshot(other), snapshot(optimizer))


def pickled(optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@every_case
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_continues_equally(device, case: Case, copied) -> None:
    options = {"nonfinite": "skip"} if case.is_own else {}
    optimizer = case.build(parameters(device), **options)
    take_steps(optimizer, 3)
    if case.is_own:
        params_of(optimizer)[0].grad.fill_(torch.nan)
        optimizer.step()
    other = copied(optimizer)
    assert_continue_equally(optimizer, other)
    assert getattr(other, "num_skipped_steps", 1) == 1


@every_case
@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "through a file"])
def test_a_loaded_state_dict_continues_bit_for_bit(device, case: Case, way) -> None:
    options = {"betas": (0.85, 0.9), "weight_decay": 0.05}
    params = parameters(device)
    groups = [{"params": params[:4], "lr": 0.02}, {"params": params[4:]}]
    optimizer = case.build(groups, **arguments(case, options))
    take_steps(optimizer, 3)
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = case.build([{"params": resumed_params[:4]}, {"params": resumed_params[4:]}])
    resumed.load_state_dict(way(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 0.02
    assert resumed.param_groups[-1]["betas"] == (0.85, 0.9)
    assert_continue_equally(optimizer, resumed)


@every_case
def test_full_states_on_the_cpu_continue_bit_for_bit(device, case: Case) -> None:
    """From torch.distributed.checkpoint, which supports few types in a state dict."""

    def build() -> tuple[torch.nn.Module, Optimizer]:
        model = torch.nn.ParameterList(parameters(device))
        return model, case.build(model.parameters())

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    (model, optimizer), (other, resumed) = build(), build()
    take_steps(optimizer, 3)
    weights, states = through_a_file(get_state_dict(model, optimizer, options=options))
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=states, options=options)
    assert_continue_equally(optimizer, resumed)


@every_own_case
def test_state_initialized_for_a_checkpoint_counts_no_step(device, case: Case) -> None:
    """torch.distributed.checkpoint initializes state by a step with zero gradients and learning rates."""
    params = parameters(device), parameters(device)
    optimizer, checkpointed = map(case.build, params)
    _, states = get_state_dict(torch.nn.ParameterList(params[1]), checkpointed)
    assert states["state"].keys() == {str(i) for i in range(len(params[1]))}
    assert_continue_equally(optimizer, checkpointed, first=0)


@every_own_case
def test_a_first_step_with_a_learning_rate_of_zero_is_a_step(device, case: Case) -> None:
    """A warm-up may start at zero."""
    optimizer = case.build(parameters(device), lr=0.0)
    take_steps(optimizer, 1)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}


@every_own_case
def test_a_tensor_learning_rate_survives_a_checkpoint(device, case: Case) -> None:
    lr = torch.tensor(0.02, device=device)
    optimizer, resumed = case.build(parameters(device), lr=lr), case.build(parameters(device))
    take_steps(optimizer, 1)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same_bits(resumed.param_groups[0]["lr"], lr)


# The next two skip torch's AdamW, which keeps state in the weight's dtype and casts what it loads.
@every_own_case
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_state_of_half_precision_weights_is_float32_also_when_loaded(device, case: Case, dtype) -> None:
    optimizer = case.build(parameters(device, dtype))
    take_steps(optimizer, 3)
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in params_of(optimizer)]
    resumed = case.build(resumed_params)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for state in resumed.state.values():
        assert {x.dtype for x in state.values()} == {torch.float32}
    saved, loaded = snapshot(optimizer), snapshot(resumed)
    assert_same_bits(loaded, saved)
    for key, value in saved[1]["state"][0].items():  # all have digits that a cast would lose
        assert key == "step" or not torch.equal(value.to(dtype).float(), value)
    assert_continue_equally(optimizer, resumed)


# SOAP refuses state in bfloat16.
STATE_DTYPES = [
    (case, dtype)
    for dtype in (torch.bfloat16, torch.float64)
    for case in OWN_CASES
    if not (is_soap(case) and dtype == torch.bfloat16)
]


@pytest.mark.parametrize(("case", "state_dtype"), STATE_DTYPES, ids=name_of)
def test_state_has_the_requested_dtype(device, case: Case, state_dtype) -> None:
    params = [*parameters(device), *parameters(device, torch.float64)]
    optimizer = case.build(params, state_dtype=state_dtype)
    take_steps(optimizer, 2)
    for param in params:
        expected = torch.float64 if param.dtype == torch.float64 else state_dtype
        state = optimizer.state[param]
        assert {x.dtype for key, x in state.items() if key != "step"} == {expected}
        assert state["step"].dtype == torch.float32
    resumed = case.build([torch.nn.Parameter(p.detach().clone()) for p in params], state_dtype=state_dtype)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_continue_equally(optimizer, resumed, first=2)


@every_own_case
def test_a_default_device_moves_nothing(device, case: Case) -> None:
    """With ``torch.set_default_device`` to a device on which a number would be lost."""
    optimizer, resumed = case.build(parameters(device)), case.build(parameters(device))
    set_gradients(params_of(optimizer), 0)
    with torch.device("meta"):
        optimizer.step()
        resumed.load_state_dict(optimizer.state_dict())
    assert_same_bits(snapshot(resumed)[1], snapshot(optimizer)[1])


@every_own_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_default_dtype_changes_nothing(device, case: Case, dtype) -> None:
    """As ``torch.set_default_dtype`` sets it for models that are built in another dtype."""
    optimizer, other = case.build(parameters(device)), case.build(parameters(device))
    take_steps(optimizer, 2)
    with default_dtype(dtype):
        take_steps(other, 2)
    assert_same_bits(snapshot(other)[1], snapshot(optimizer)[1])


@every_own_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_a_step_changes_nothing(device, case: Case, dtype) -> None:
    """It is for the model, as in torch's optimizers; a loop may have the step inside by mistake."""
    optimizer, other = case.build(parameters(device)), case.build(parameters(device))
    take_steps(optimizer, 2)
    with torch.autocast(torch.device(device).type, dtype):
        take_steps(other, 2)
        assert torch.is_autocast_enabled(torch.device(device).type)
    assert_same_bits(snapshot(other)[1], snapshot(optimizer)[1])


def test_a_hook_on_saving_may_drop_options(device) -> None:
    optimizer = MERIT(parameters(device))

    def only_rates(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [{"params": group["params"], "lr": group["lr"]} for group in saved["param_groups"]]
        return {"state": saved["state"], "param_groups": groups}

    optimizer.register_state_dict_post_hook(only_rates)
    assert [set(group) for group in optimizer.state_dict()["param_groups"]] == [{"params", "lr"}]


@every_own_case
def test_hooks_on_loading_see_plain_tensors(device, case: Case) -> None:
    """A user's hook gets the state dict as saved."""
    optimizer, resumed = case.build(parameters(device)), case.build(parameters(device))
    take_steps(optimizer, 1)
    seen: list[dict[str, Any]] = []
    resumed.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict))
    resumed.load_state_dict(optimizer.state_dict())
    assert all(isinstance(x, torch.Tensor) for x in seen[0]["state"][0].values())
    # A second load works like the first: no hook is left registered.
    resumed.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2
    assert len(resumed._optimizer_load_state_dict_pre_hooks) == 1


def test_a_group_of_another_optimizer_does_not_bring_its_algorithm(device) -> None:
    """A checkpoint would be taken for one of the other, whose learning rate means something else."""
    (weight, *_) = parameters(device)
    groups = LAMB([weight], lr=0.5).param_groups
    optimizer, other = (MERIT([{**group} for group in groups]) for _ in range(2))
    optimizer.param_groups[0]["lr"] = 0.125
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["algorithm"] == "merit"
    assert other.param_groups[0]["lr"] == 0.125
