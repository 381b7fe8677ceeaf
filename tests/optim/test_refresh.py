"""SOAP's bases are improved in turns: balanced, the same everywhere, or by the authors' schedule."""

from typing import Any

import pytest
import torch
from optimizer_cases import assert_same_bits, params_of, random_tensor, snapshot, take_steps
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_optim import SOAP, SOAPMERIT
from merit_optim.optim.axes.directions import Soap
from merit_optim.optim.matrices import View, matrices_of
from merit_optim.optim.refresh import Members, phases_of, spread
from merit_optim.optim.spec import Spec

Shape = tuple[int, ...]

# Width and depth; each layer has four hidden matrices.
GPT2 = {"small": (768, 12), "medium": (1024, 24), "large": (1280, 36)}


def hidden_shapes(width: int, depth: int) -> list[Shape]:
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * depth


SMALL = hidden_shapes(2, 3)
"""Twelve matrices, more than there are phases."""
FREQUENCY = 10


def built(shapes: list[Shape], optimizer_class: Any = SOAPMERIT, **options: Any) -> Any:
    """An optimizer of matrices that depend only on their shapes."""
    params = [nn.Parameter(random_tensor(shape, i, scale=0.3)) for i, shape in enumerate(shapes)]
    return optimizer_class([{"params": params, "direction": "soap"}], **options)


def members(optimizer: Optimizer) -> Members:
    """The spec and the parameters of every group."""
    return [(Spec.of(group), group["params"]) for group in optimizer.param_groups]


def phases(optimizer: Optimizer) -> list[int]:
    """In the order of the parameters."""
    by_param = phases_of(members(optimizer))
    return [by_param[param] for param in params_of(optimizer)]


def phases_of_shapes(shapes: list[Shape], **options: Any) -> list[int]:
    """The phases of meta parameters, which take no memory."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    return phases(SOAP([{"params": params, "direction": "soap"}], **options))


def bases(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    states = [optimizer.state[param] for param in params_of(optimizer)]
    return [(state["row_basis"].clone(), state["column_basis"].clone()) for state in states]


def improved_in_each_step(optimizer: Optimizer, num_steps: int, first: int = 0) -> list[list[int]]:
    """The indices of the parameters whose bases changed, for each step."""
    improved = []
    for step in range(first, first + num_steps):
        before = bases(optimizer) if optimizer.state else None
        take_steps(optimizer, 1, first=step)
        pairs = zip(bases(optimizer), before or (), strict=bool(before))
        improved.append([i for i, (new, old) in enumerate(pairs) if not all(map(torch.equal, new, old))])
    return improved


# --- phases have equal cost -------------------------------------------------------------------------------


def test_the_heaviest_come_first_and_each_goes_to_the_lightest_phase() -> None:
    #      5 and 4 have a phase each; 3 joins 4; 2 joins 5; 1, at 7 and 7, the first of both
    assert spread((1, 2, 3, 4, 5), 2) == (0, 0, 1, 1, 0)
    assert spread((7, 7, 7), 5) == (0, 1, 2)
    assert spread((7,) * 5, 2) == (0, 1, 0, 1, 0)
    assert spread((3, 4), 1) == (0, 0)
    assert spread((), 3) == ()


def test_the_cost_counts_stacked_matrices_and_rotated_sides() -> None:
    soap = Soap(max_precond_dim=10)
    assert soap.refresh_cost(matrices_of((10, 4))) == 100 + 16
    assert soap.refresh_cost(matrices_of((11, 4))) == 16
    assert soap.refresh_cost(matrices_of((11, 12))) == 0
    assert soap.refresh_cost(matrices_of((3, 5, 4), matrix_dims=2)) == 3 * (25 + 16)


# The largest load of a phase over the mean load, by the operations and by the time of a QR on an H200.
LARGEST_LOAD = {
    ("small", 3): 1.036,
    ("medium", 3): 1.008,
    ("large", 3): 1.017,
    ("small", 1.4): 1.033,
    ("medium", 1.4): 1.009,
    ("large", 1.4): 1.017,
}


@pytest.mark.parametrize(("name", "exponent"), LARGEST_LOAD)
def test_phases_are_balanced(name, exponent) -> None:
    shapes = hidden_shapes(*GPT2[name])
    loads = [0.0] * FREQUENCY
    for shape, phase in zip(shapes, phases_of_shapes(shapes), strict=True):
        loads[phase] += sum(side**exponent for side in shape)
    largest = max(loads) / (sum(loads) / FREQUENCY)
    assert largest == pytest.approx(LARGEST_LOAD[name, exponent], abs=5e-4)


def test_groups_of_one_frequency_share_its_phases() -> None:
    """Whichever groups they are in. Groups with another frequency take separate turns."""
    shapes = [(4, 4)] * 6
    params = [nn.Parameter(random_tensor(shape, i)) for i, shape in enumerate(shapes)]
    groups = [
        {"params": params[:2], "direction": "soap", "lr": 0.1},
        {"params": params[2:4], "direction": "soap", "precondition_frequency": 3},
        {"params": params[4:5], "direction": "soap"},
        {"params": params[5:], "direction": "soap", "refresh_phase": 7},
        {"params": [nn.Parameter(torch.ones(3))], "direction": "adam"},
    ]
    by_param = phases_of(members(SOAP(groups)))
    assert [by_param.get(param) for param in params] == [0, 1, 0, 1, 2, None]


# --- what a step does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [SOAPMERIT, SOAP])
def test_every_matrix_is_improved_once_in_a_cycle_and_in_its_own_step(optimizer_class) -> None:
    optimizer = built(SMALL, optimizer_class)
    first, *steps = improved_in_each_step(optimizer, 1 + 2 * FREQUENCY)
    assert not first  # it computes the bases
    for taken, improved in enumerate(steps, start=1):
        assert improved == [i for i, phase in enumerate(phases(optimizer)) if phase == taken % FREQUENCY]
    assert set(phases(optimizer)) == set(range(FREQUENCY))


def test_a_single_matrix_has_the_authors_schedule() -> None:
    steps = improved_in_each_step(built([(4, 3)], precondition_frequency=3), 8)
    assert [taken for taken, improved in enumerate(steps) if improved] == [3, 6]


def test_a_fixed_phase_improves_all_at_once() -> None:
    for phase in (0, 4):
        optimizer = built(SMALL, refresh_phase=phase)
        assert not phases_of(members(optimizer))
        steps = improved_in_each_step(optimizer, 16)
        expected = [taken for taken in range(1, 16) if taken % FREQUENCY == phase]
        assert [taken for taken, improved in enumerate(steps) if improved] == expected
        assert all(improved in ([], list(range(len(SMALL)))) for improved in steps)


# --- the same everywhere ----------------------------------------------------------------------------------


def test_parameters_without_gradients_change_no_phase() -> None:
    """Phases are assigned over all parameters, with or without gradients, and count each matrix's steps."""
    whole, part = built(SMALL, precondition_frequency=4), built(SMALL, precondition_frequency=4)
    left_out = {0, 3, 4}
    for step in range(1, 11):
        take_steps(whole, 1, first=step)
        for i, (param, other) in enumerate(zip(params_of(part), params_of(whole), strict=True)):
            param.grad = None if i in left_out else other.grad.clone()
        part.step()
    assert phases(part) == phases(whole)
    for i, (param, other) in enumerate(zip(params_of(part), params_of(whole), strict=True)):
        if i not in left_out:
            assert_same_bits(param.detach(), other.detach(), f"parameter {i}")


def loaded(saved: dict[str, Any], weights: list[Tensor], **options: Any) -> Any:
    """A fresh optimizer with the saved weights and state."""
    optimizer = built(SMALL, **options)
    optimizer.load_state_dict(saved)
    for param, weight in zip(params_of(optimizer), weights, strict=True):
        param.detach().copy_(weight)
    return optimizer


@pytest.mark.parametrize("num_before", range(1, 6))
def test_it_resumes_in_the_middle_of_a_cycle(num_before) -> None:
    """Bit for bit, at every step of the cycle."""
    optimizer = built(SMALL, precondition_frequency=4)
    take_steps(optimizer, num_before)
    weights, saved = snapshot(optimizer)
    resumed = loaded(saved, weights, precondition_frequency=4)
    assert phases(resumed) == phases(optimizer)
    for each in (optimizer, resumed):
        take_steps(each, 6, first=num_before)
    assert_same_bits(snapshot(resumed), snapshot(optimizer))


def test_a_saved_phase_is_loaded_and_a_missing_one_means_turns() -> None:
    weights, saved = snapshot(built(SMALL, refresh_phase=3))
    _, not_given = snapshot(built(SMALL))
    assert loaded(saved, weights).param_groups[0]["refresh_phase"] == 3
    assert not phases_of(members(loaded(saved, weights)))
    assert loaded(not_given, weights, refresh_phase=5).param_groups[0]["refresh_phase"] is None


def test_training_continues_with_another_order_of_the_parameters() -> None:
    """Phases change, but every matrix is still improved once in every cycle of its steps."""
    optimizer = built(SMALL, precondition_frequency=4)
    take_steps(optimizer, 6)
    before = phases(optimizer)
    optimizer.param_groups[0]["params"].reverse()
    assert phases(optimizer) != before[::-1]
    steps = improved_in_each_step(optimizer, 8, first=6)
    assert sorted(i for improved in steps[:4] for i in improved) == list(range(len(SMALL)))
    assert steps[:4] == steps[4:]


# --- steps that are skipped -------------------------------------------------------------------------------


def test_soap_counts_steps_on_the_host_even_if_the_device_skips_them(device) -> None:
    """SOAP reads its counts for every matrix; the counts of the rest are where the decision is made."""
    matrix = nn.Parameter(random_tensor((4, 3), 1, device=device))
    vector = nn.Parameter(random_tensor((4,), 2, device=device))
    groups = [{"params": [matrix], "direction": "soap"}, {"params": [vector], "direction": "adam"}]
    optimizer = SOAP(groups, nonfinite="skip", foreach=True)
    for step, bad in enumerate([True, False, True, False]):
        take_steps(optimizer, 1, first=step)  # creates the state and the gradients
        for param in (matrix, vector):
            param.grad.fill_(float("nan")) if bad else None
        optimizer.step()
    counts = [optimizer.state[param]["step"] for param in (matrix, vector)]
    assert [count.device.type for count in counts] == ["cpu", device.type]
    assert [count.item() for count in counts] == [6, 6]
    assert optimizer.num_skipped_steps == 2
    on_device = torch.empty(4, 3, device="meta")
    for group, expected in zip(optimizer.param_groups, ("cpu", "meta"), strict=True):
        assert optimizer._step_device(on_device, group).type == expected


@pytest.mark.parametrize("phase", [None, 9])
def test_a_first_step_that_will_be_skipped_computes_finite_state(phase) -> None:
    """The device decides to skip it while the host continues with a count of 0."""
    shape = matrices_of((4, 3))
    soap = Soap(refresh_phase=phase)
    state = tuple(torch.zeros(size or shape.shape) for size in soap.shapes(shape, View()))
    d, new = soap.advance(random_tensor(shape.shape, 1), state, torch.tensor(0.0))
    assert d is None
    assert all(not x.is_complex() and x.isfinite().all() for x in new)
