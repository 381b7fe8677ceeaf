"""Invalid input raises an error that says what was given and what is allowed, and changes nothing."""

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import (
    FAMILY,
    HIDDEN,
    OWN,
    OWN_BUT_SOAP,
    Hidden,
    add_group,
    assert_same_bits,
    assert_unchanged,
    is_soap,
    name_of,
    parameters,
    params_of,
    random_tensor,
    set_gradients,
    snapshot,
    take_steps,
)
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from merit_optim import MERIT, SOAPMERIT, Lion, MuonMERIT, SophiaG

every_own_class = pytest.mark.parametrize("optimizer_class", OWN, ids=name_of)
every_trust_ratio_class = pytest.mark.parametrize("optimizer_class", [*FAMILY, *HIDDEN], ids=name_of)

FAMILYS = (*FAMILY, *HIDDEN)
SOAPS = tuple(filter(is_soap, HIDDEN))
WITH_RATIOS = (MERIT, Hidden(MuonMERIT), Hidden(SOAPMERIT))
# Who refuses an option, with which value, and what the message says.
REFUSED: list[tuple[Sequence[Any], str, Any, str]] = [
    (OWN, "lr", -0.1, "lr is -0.1; it must be a finite number that is at least 0"),
    (OWN, "lr", float("inf"), "lr is inf; it must be a finite number"),
    (OWN, "lr", float("nan"), "lr is nan; it must be a finite number"),
    (OWN, "lr", "fast", "lr is 'fast'; it must be a finite number"),
    (OWN, "lr", True, "lr is True; it must be a finite number"),
    (OWN, "lr", torch.tensor(-0.5), "lr is -0.5; it must be a finite number"),
    (OWN, "lr", torch.ones(2), "lr is a tensor of shape (2,). Tensor lr must be 1-element"),
    (
        OWN,
        "betas",
        (0.9, 1.0),
        "betas is (0.9, 1.0); it must be two numbers, each at least 0",
    ),
    (OWN, "betas", (-0.1, 0.9), "betas is (-0.1, 0.9); it must be two numbers"),
    (OWN, "betas", (0.9,), "betas is (0.9,); it must be two numbers"),
    (OWN, "betas", 0.9, "betas is 0.9; it must be two numbers"),
    (OWN, "weight_decay", -1, "weight_decay is -1; it must be a finite number that is at least 0"),
    (OWN, "nonfinite", "ignore", "nonfinite is 'ignore'; it must be one of 'propagate', 'skip', 'raise'"),
    (OWN, "max_grad_norm", 0, "max_grad_norm is 0; it must be greater than 0, or None for no clipping"),
    (OWN, "state_dtype", torch.int32, "state_dtype is torch.int32; it must be one of torch.float32"),
    (OWN, "state_dtype", "float32", "state_dtype is 'float32'; it must be one of torch.float32"),
    (OWN, "maximize", "no", "maximize is 'no'; it must be True or False"),
    (FAMILYS, "matrix_dims", 0, "matrix_dims is 0; it must be a whole number that is at least 1, or None"),
    (FAMILYS, "matrix_dims", 1.5, "matrix_dims is 1.5; it must be a whole number"),
    (FAMILYS, "matrix_dims", True, "matrix_dims is True; it must be a whole number"),
    (FAMILYS, "foreach", "x", "foreach is 'x'; it must be True or False, or None"),
    (
        FAMILYS,
        "split",
        1.5,
        "split is 1.5; it must be the number of equal parts, such as 3, or the size of each",
    ),
    (FAMILYS, "split", (2, 0), "split is (2, 0); it must be the number of equal parts"),
    (FAMILYS, "split_dim", 2, "split_dim is 2; it must be one of 0, 1"),
    (WITH_RATIOS, "clip", 0, "clip is 0; it must be greater than 0, or None for no clip"),
    (WITH_RATIOS, "clip", float("nan"), "clip is nan; it must be greater than 0"),
    (WITH_RATIOS, "norm", "l1", "norm is 'l1'; it must be one of 'max', 'l2'"),
    (WITH_RATIOS, "element_wise", "x", "element_wise is 'x'; it must be True or False"),
    (FAMILY, "eps", 0, "eps is 0; it must be greater than 0, or the default 1e-6"),
    (FAMILY, "eps", 1e-50, "eps is 1e-50, too small for float32; it must be at least 1.2e-38"),
    (FAMILY, "eps", float("inf"), "eps is inf; it must be finite"),
    (FAMILY, "bias_correction", None, "bias_correction is None; it must be True or False"),
    (SOAPS, "capturable", True, "direction='soap' counts its steps on the host: use capturable=False"),
    (SOAPS, "differentiable", True, "direction='soap' counts its steps on the host: use differentiable=F"),
    (
        SOAPS,
        "state_dtype",
        torch.bfloat16,
        "direction='soap' decomposes its state, and bfloat16 is",
    ),
    ([SophiaG], "gamma", 0, "gamma is 0; it must be greater than 0, or the default 0.05"),
    ([SophiaG], "eps", 0, "eps is 0; it must be greater than 0, or the default 1e-12"),
    ([SophiaG], "hessian_interval", 0, "hessian_interval is 0; it must be a whole number that is at least 1"),
]


@pytest.mark.parametrize(("classes", "option", "value", "message"), REFUSED)
def test_an_option_out_of_range_is_refused(classes, option, value, message) -> None:
    """As an argument, and in a group, which may have options that its class has not."""
    for optimizer_class in classes:
        of_vectors = option == "betas" and getattr(optimizer_class, "direction", None) == "muon"
        options = {"kinds": {"vector": {option: value}}} if of_vectors else {option: value}
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer_class(parameters(), **options)
        if option not in ("capturable", "differentiable", "hessian_interval"):
            *others, last = sorted(parameters()[:2], key=Tensor.dim, reverse=of_vectors)
            with pytest.raises(ValueError, match=re.escape(message)):
                optimizer_class([{"params": others}, {"params": [last], option: value}])


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="foreach=True and differentiable=True exclude each other"):
        MERIT(parameters(), foreach=True, differentiable=True)


@every_trust_ratio_class
def test_fused_is_refused_if_it_is_not_available(optimizer_class) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match="fused=True"):
        optimizer_class(parameters("cpu"), fused=True)


@every_own_class
@pytest.mark.parametrize(("option", "value"), [("max_grad_norm", 2.0), ("nonfinite", "skip")])
def test_groups_that_differ_in_options_of_the_whole_step_are_refused(optimizer_class, option, value) -> None:
    params = parameters()
    message = f"parameter groups have {option}=.* it must be equal for the whole step"
    with pytest.raises(ValueError, match=message):
        optimizer_class([{"params": params[:2], option: value}, {"params": params[2:]}])
    optimizer = optimizer_class(params[:2])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        add_group(optimizer, {"params": params[2:], option: value})
    assert_unchanged(optimizer, before)
    optimizer_class([{"params": p, option: value} for p in params])  # equal options are fine


# SOAP is never differentiable.
@pytest.mark.parametrize("optimizer_class", OWN_BUT_SOAP, ids=name_of)
def test_a_group_cannot_be_differentiable_by_itself(optimizer_class) -> None:
    """torch records the whole step or nothing: a group's option would be ignored."""
    params = parameters()
    with pytest.raises(ValueError, match="a parameter group has differentiable=True, the optimizer False"):
        optimizer_class([{"params": params, "differentiable": True}])
    with pytest.raises(ValueError, match="a parameter group has differentiable=False, the optimizer True"):
        optimizer_class([{"params": params, "differentiable": False}], differentiable=True)
    optimizer_class([{"params": params, "differentiable": True}], differentiable=True)


@every_trust_ratio_class
def test_parameters_without_a_shape_yet_are_refused(optimizer_class) -> None:
    model = nn.LazyLinear(4)
    with pytest.raises(TypeError, match=r"weight has no shape yet; .* one forward pass"):
        optimizer_class(model.named_parameters())
    optimizer = optimizer_class(parameters())
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=rf"parameter 0 of group {len(optimizer.param_groups)} has no shape"):
        add_group(optimizer, {"params": model.parameters()})
    assert_unchanged(optimizer, before)
    model(torch.ones(2, 3))
    add_group(optimizer, {"params": model.parameters()})


@every_own_class
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool], ids=str)
def test_parameters_that_are_not_real_floating_point_are_refused(optimizer_class, dtype) -> None:
    stranger = torch.zeros(3, dtype=dtype)
    with pytest.raises(TypeError, match=rf"parameter 1 of group 0 has dtype {dtype}; .* real floating-point"):
        optimizer_class([nn.Parameter(torch.zeros(3)), stranger])
    optimizer = optimizer_class([("first", nn.Parameter(torch.zeros(3)))])
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=f"layer has dtype {dtype}"):
        add_group(optimizer, {"params": [("layer", stranger)]})
    assert_unchanged(optimizer, before)


@every_own_class
def test_a_sparse_gradient_is_refused(device, optimizer_class) -> None:
    def build() -> tuple[list[nn.Parameter], Any]:
        params = [nn.Parameter(random_tensor((4, 3), i, device=device)) for i in range(2)]
        return params, optimizer_class(params, lr=0.1)

    params, optimizer = build()
    set_gradients(params, 0)
    dense = params[1].grad
    params[1].grad = dense.to_sparse()
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        TypeError, match=r"parameter 1 of group 0 \(shape \(4, 3\)\) has layout torch.sparse_coo; .* sparse=F"
    ):
        optimizer.step()
    assert_same_bits([p.detach() for p in params], before)
    assert params[1] not in optimizer.state
    # Later steps are as if the refused step had not been taken.
    params[1].grad = dense
    optimizer.step()
    others, reference = build()
    set_gradients(others, 0)
    reference.step()
    assert_same_bits(snapshot(optimizer), snapshot(reference))


@every_trust_ratio_class
def test_a_flat_parameter_of_fsdp1_is_refused(optimizer_class) -> None:
    flat = nn.Parameter(torch.zeros(12))
    flat._fsdp_flattened = True
    with pytest.raises(TypeError, match=r"flat parameter of FSDP1: .* Use FSDP2"):
        optimizer_class([flat])


@every_trust_ratio_class
@pytest.mark.parametrize("after_steps", [0, 2])
def test_flat_buffers_instead_of_the_parameters_are_refused(device, optimizer_class, after_steps) -> None:
    """As DeepSpeed's ZeRO substitutes them. Directions that need matrices refuse vectors first."""
    params = parameters(device)
    optimizer = optimizer_class(params)
    take_steps(optimizer, after_steps)
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
    flat.grad = torch.ones_like(flat)
    optimizer.param_groups[-1]["params"] = [flat]
    before = flat.detach().clone()
    with pytest.raises(
        TypeError, match=rf"replaced by a flat buffer of {flat.numel()} elements.* DeepSpeed ZeRO"
    ):
        optimizer.step()
    assert_same_bits(flat.detach(), before)
    assert flat not in optimizer.state


@every_own_class
def test_state_of_an_optimizer_with_other_state_is_refused(device, optimizer_class) -> None:
    optimizer = optimizer_class(parameters(device))
    take_steps(optimizer, 2)
    before = snapshot(optimizer)
    groups = [{"params": [p.detach().clone() for p in group["params"]]} for group in optimizer.param_groups]
    stranger = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    take_steps(stranger, 1)
    # Muon has a momentum of the same name, but SGD's is a sum, not an average.
    missing = {"NorMuon": "'second_momentum_buffer', 'step'", "OrScale": "'first_ratio', 'step'"}
    missing |= dict.fromkeys(("Muon", "MuonMERIT"), "'step'")
    missing |= dict.fromkeys(("MuonSphere", "NorMuonSphere"), "'radius'.*'step'") | {"Muown": "'step'"}
    missing_here = missing.get(optimizer_class.__name__, ".*'exp_avg'.*'step'")
    with pytest.raises(ValueError, match=rf"has \['momentum_buffer'\] but not .*{missing_here}"):
        optimizer.load_state_dict(stranger.state_dict())
    assert_unchanged(optimizer, before)


@every_own_class
def test_state_of_other_parameters_is_refused(device, optimizer_class) -> None:
    optimizer = optimizer_class([(f"layer.{i}", p) for i, p in enumerate(parameters(device))])
    take_steps(optimizer, 2)
    before = snapshot(optimizer)
    # Hidden matrices have a separate group, in which the last comes first.
    key = "momentum_buffer" if getattr(optimizer_class, "direction", None) == "muon" else "exp_avg"
    last = r"\(3, 2, 2, 2\)" if isinstance(optimizer_class, Hidden) else r"\(\)"
    for params, message in (
        (parameters(device)[::-1], rf"{key} of layer.0 has shape {last}, the parameter \(5, 7\)"),
        (parameters(device)[:-1], "other groups: .* another model"),
    ):
        other = optimizer_class(params)
        take_steps(other, 1)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
        assert_unchanged(optimizer, before)


def test_parameters_with_kinds_may_have_every_form_that_torch_accepts() -> None:
    matrix, _, other, *_ = parameters()
    one = {"params": matrix, "kind": "hidden"}
    several = {"params": (p for p in [other]), "kind": "hidden"}
    optimizer = MuonMERIT([one, several])
    assert list(map(id, params_of(optimizer))) == [id(matrix), id(other)]


def test_curvature_from_no_labels_is_refused() -> None:
    optimizer = SophiaG(parameters())
    for num_labels in (0, float("nan"), "x"):
        with pytest.raises(ValueError, match=f"num_labels is {num_labels!r}; the loss is a mean over"):
            optimizer.update_hessian(num_labels=num_labels)


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"lr": float("nan")}, "lr is nan; it must be a finite number"),
    ({"lr": torch.ones(2)}, "lr is a tensor of shape (2,). Tensor lr must be 1-element"),
    ({"betas": (1.0, 0.9)}, "betas is (1.0, 0.9); it must be two numbers"),
    ({"weight_decay": None}, "weight_decay is None; it must be a finite number"),
    ({"maximize": "no"}, "maximize is 'no'; it must be True or False"),
    ({"nonfinite": "skip"}, "parameter groups have nonfinite='skip' and 'propagate'"),
    ({"max_grad_norm": 1.0}, "parameter groups have max_grad_norm=1.0 and None"),
]


@every_own_class
@pytest.mark.parametrize(("changed", "message"), CHANGED, ids=repr)
def test_options_that_became_invalid_are_refused_before_anything_changes(
    device, optimizer_class, changed, message
) -> None:
    """In a step and in a saved state."""
    params = parameters(device)
    optimizer = optimizer_class([{"params": params[:2]}, {"params": params[2:]}])
    take_steps(optimizer, 2)
    before, options = snapshot(optimizer), dict(optimizer.param_groups[1])
    optimizer.param_groups[1].update(changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        take_steps(optimizer, 1, first=2)
    optimizer.param_groups[1].update(options)
    assert_unchanged(optimizer, before)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1].update(changed)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        optimizer.load_state_dict(saved)
    assert "change it in its 'param_groups'" in refused.value.__notes__[0]
    assert_unchanged(optimizer, before)
    take_steps(optimizer, 1, first=2)


@every_own_class
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1])
def test_a_bad_rate_written_into_its_tensor_is_refused_before_anything_changes(
    device, optimizer_class, bad
) -> None:
    rate = torch.tensor(0.1)  # on the host, where it can be read
    optimizer = optimizer_class(parameters(device), lr=rate)
    take_steps(optimizer, 2)
    before = snapshot(optimizer)
    rate.fill_(bad)
    with pytest.raises(ValueError, match=rf"lr is {bad}.*; it must be a finite number that is at least 0"):
        take_steps(optimizer, 1, first=2)
    rate.fill_(0.1)
    assert_unchanged(optimizer, before)
    take_steps(optimizer, 1, first=2)


@pytest.mark.parametrize("optimizer_class", [*FAMILY, Lion, SophiaG], ids=name_of)
@pytest.mark.parametrize("with_a_schedule", [False, True])
def test_a_list_that_was_changed_in_place_is_checked_again(device, optimizer_class, with_a_schedule) -> None:
    optimizer = optimizer_class(parameters(device), betas=[0.9, 0.95])
    take_steps(optimizer, 2)
    before, rate = snapshot(optimizer), optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["betas"][0] = 1.5
    if with_a_schedule:
        optimizer.param_groups[0]["lr"] = rate / 2
    with pytest.raises(ValueError, match=re.escape("betas is [1.5, 0.95]; it must be two numbers")):
        take_steps(optimizer, 1, first=2)
    optimizer.param_groups[0].update(betas=[0.9, 0.95], lr=rate)
    assert_unchanged(optimizer, before)
    take_steps(optimizer, 1, first=2)


@every_own_class
@pytest.mark.parametrize("shape", [(7, 5), (35,), (5, 8)], ids=str)
def test_data_of_another_shape_is_refused_before_anything_changes(device, optimizer_class, shape) -> None:
    """With the same number of elements, the state would be read as if it had that shape."""
    params = parameters(device)
    optimizer = optimizer_class(params)
    take_steps(optimizer, 2)
    before, data = snapshot(optimizer), params[0].data
    params[0].data, params[0].grad = torch.ones(shape, device=device), None
    with pytest.raises(ValueError, match=re.escape(f"has shape {shape}, and its state (5, 7)")):
        take_steps(optimizer, 1, first=2)
    params[0].data, params[0].grad = data, None
    assert_unchanged(optimizer, before)
    take_steps(optimizer, 1, first=2)


@pytest.mark.parametrize("state", [{}, {"state": {}}], ids=str)
def test_what_is_not_an_optimizer_state_is_refused(state) -> None:
    with pytest.raises(
        ValueError, match="is not the state of an optimizer, which has 'state' and 'param_groups'"
    ):
        MERIT(parameters()).load_state_dict(state)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "message"),
    [
        (None, 0, r"is a DTensor and its saved exp_avg is not; .*set_optimizer_state_dict"),
        (
            0,
            None,
            r"saved exp_avg of .* is a DTensor and the parameter is not; .*get_optimizer_state_dict",
        ),
        (0, 1, r"the saved exp_avg of .* is placed as .*Shard\(dim=0\).*, the parameter as .*Shard\(dim=1\)"),
    ],
    ids=["whole for a shard", "a shard for a whole", "another shard"],
)
def test_state_that_is_sharded_differently_is_refused(saved_as, loaded_as, message) -> None:
    """Parts of a square weight that is cut the other way have the same number of elements."""

    def build(cut: int | None) -> MERIT:
        weight = torch.ones(4, 4) if cut is None else distribute_tensor(torch.ones(4, 4), mesh, [Shard(cut)])
        optimizer = MERIT([nn.Parameter(weight)])
        optimizer.param_groups[0]["params"][0].grad = torch.ones_like(weight)
        optimizer.step()
        return optimizer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        saved, loading = build(saved_as), build(loaded_as)
        with pytest.raises(ValueError, match=message):
            loading.load_state_dict(saved.state_dict())
    finally:
        dist.destroy_process_group()
