"""Saving and loading state: check that a state dict fits, and load it bit for bit."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from merit_optim.optim import options, states, validate
from merit_optim.optim.axes.registered import chosen
from merit_optim.optim.engines.ranks.placements import is_sharded, stacked_placements
from merit_optim.optim.names import plain

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

    from merit_optim.optim.base import SafeOptimizer

Group = dict[str, Any]


class AsSaved:
    """Protects a tensor from ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def with_dtype_names(group: Group) -> Group:
    """Options with the state dtype as a name: torch.distributed.checkpoint cannot store dtypes in groups."""
    if "state_dtype" not in group:  # a user's hook may have removed it
        return group
    return {**group, "state_dtype": str(group["state_dtype"]).removeprefix("torch.")}


def with_dtype(group: Group) -> Group:
    """The inverse of ``with_dtype_names``."""
    name = group.get("state_dtype")
    return {**group, "state_dtype": getattr(torch, name, name)} if isinstance(name, str) else group


def made_loadable(optimizer: SafeOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict for ``Optimizer.load_state_dict``; raise if it does not fit.

    The options of another optimizer are replaced by the current ones, because they mean something else there.
    """
    validate.saved_state(state_dict)
    _check_directions(optimizer, state_dict)
    saved_groups = _by_name(state_dict["param_groups"], optimizer.param_groups)
    _check_sizes(optimizer, saved_groups)
    ours = [saved.get("algorithm") == optimizer.ALGORITHM for saved in saved_groups]
    groups = [
        with_dtype(saved) if is_ours else {**current, "params": saved["params"]}
        for saved, current, is_ours in zip(saved_groups, optimizer.param_groups, ours, strict=True)
    ]
    whole_groups = [{**optimizer.defaults, **group} for group in groups]
    _check_options(optimizer, whole_groups)
    state = dict(state_dict["state"])
    for index, (group, saved_group, is_ours) in enumerate(zip(whole_groups, saved_groups, ours, strict=True)):
        requires_step = optimizer._needs_step(group) or not _is_torch_muon(saved_group)
        for param_id, (name, param) in zip(group["params"], optimizer._named(index), strict=True):
            if state.get(param_id):
                shapes = optimizer._state_shapes(param, group)
                missing = {*shapes, *(["step"] if requires_step else [])} - state[param_id].keys()
                if not is_ours and missing <= set(optimizer._keys_that_can_begin(group)):
                    state[param_id] = state[param_id] | _begun(optimizer, param, group, missing)
                    missing = set()
                _check(optimizer, name, param, group, state[param_id], shapes, missing)
                state[param_id] = _carried(state[param_id], None if all(ours) else ("step", *shapes))
    return {**state_dict, "state": state, "param_groups": groups}


def _check_directions(optimizer: SafeOptimizer, state_dict: dict[str, Any]) -> None:
    """Raise if another optimizer's state fits one direction and this optimizer has another one as well.

    The groups of such states differ too, but other groups alone would not help.
    """
    keys = set(chain.from_iterable(state_dict["state"].values()))
    saved_groups = state_dict["param_groups"]
    is_ours = any(saved.get("algorithm") == optimizer.ALGORITHM for saved in saved_groups)
    if is_ours or not ("step" in keys or any(map(_is_torch_muon, saved_groups))):
        return
    directions = [chosen(group, "direction") for group in optimizer.param_groups if "direction" in group]
    missing = {one.NAME: {*one.keys} - {*one.keys_that_can_begin} - keys for one in directions}
    known = [name for name, lacks in missing.items() if not lacks]
    if known and (unknown := [name for name, lacks in missing.items() if lacks]):
        ours, theirs, other = type(optimizer).__name__, known[0], unknown[0]
        raise ValueError(
            f"the saved state, {sorted(keys)}, fits the weights of {ours} with direction={theirs!r}; those "
            f"with {other!r} need {sorted(missing[other])} and begin anew. Load it into {ours} with the "
            f"groups that it was saved from, each with direction={theirs!r}, and hand it over for the "
            "weights with that direction here: optimizer.state[weight] = loaded.state[weight]."
        )


def _check_sizes(optimizer: SafeOptimizer, saved_groups: list[Group]) -> None:
    """Raise if the saved groups have other numbers of parameters than the optimizer's."""
    saved_sizes, sizes = _num_parameters(saved_groups), _num_parameters(optimizer.param_groups)
    if saved_sizes == sizes:
        return
    differs = "a different number of parameter groups" if len(saved_sizes) != len(sizes) else "other groups"
    same_total = sum(saved_sizes) == sum(sizes)
    way_out = (
        "Load it into an optimizer with its groups, and hand the state over: "
        "optimizer.state.update(loaded.state)."
        if same_total
        else "It is of another model, or of one with other frozen or tied parameters."
    )
    raise ValueError(
        f"the saved state has {differs}: of {_listed(saved_sizes)} parameters, and this "
        f"{type(optimizer).__name__} of {_listed(sizes)}. {way_out}"
    )


def _check_options(optimizer: SafeOptimizer, groups: list[Group]) -> None:
    """Raise if a saved option is not allowed."""
    try:
        for group in groups:
            # A schedule may have ended just below zero; the next step checks the rate that it is taken with.
            lr = group["lr"]
            optimizer._check_group({**group, "lr": abs(lr)} if isinstance(lr, float) else group)
        options.check_alike(groups[0], groups)
    except ValueError as error:
        error.add_note("The value is in the saved state; change it in its 'param_groups' before loading.")
        raise


def _by_name(saved_groups: list[Group], groups: list[Group]) -> list[Group]:
    """The saved groups and their parameters in the order of the current ones, if all have the same names.

    torch goes by positions, and so does this where names are missing or others, as those of a wrapped model.
    """
    saved_names, names = list(map(_names, saved_groups)), list(map(_names, groups))
    all_names = list(chain(*names))
    are_unique = len(set(all_names)) == len(all_names) == sum(_num_parameters(groups))
    if not are_unique or sorted(chain(*saved_names)) != sorted(all_names):
        return saved_groups
    of_names = {frozenset(some): group for some, group in zip(saved_names, saved_groups, strict=True)}
    ordered: list[Group] = []
    for index, some in enumerate(names):
        if frozenset(some) not in of_names:
            raise ValueError(
                "the saved state has the parameters of this optimizer in other groups: none has exactly the "
                f"{len(some)} of group {index} ({', '.join(some[:3])}, ...). Group them as they were saved, "
                "or load with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which takes "
                "each state by name."
            )
        saved = of_names[frozenset(some)]
        keys = dict(zip(_names(saved), saved["params"], strict=True))
        ordered.append({**saved, "params": [keys[name] for name in some], "param_names": some})
    return ordered


def _is_torch_muon(group: Group) -> bool:
    """Whether a saved group is torch.optim.Muon's, which counts no steps. SGD's momentum is not ours."""
    return "ns_steps" in group


def _names(group: Group) -> list[str]:
    """The names of a group's parameters, if they are known."""
    params = group["params"]
    # torch.distributed.checkpoint puts names in place of numbers, already in the order of the optimizer.
    names = params if all(isinstance(param, str) for param in params) else group.get("param_names", ())
    return list(map(plain, names)) if len(names) == len(params) else []


def _begun(optimizer: SafeOptimizer, param: Tensor, group: Group, keys: set[str]) -> dict[str, Any]:
    """These of a parameter's state tensors, new."""
    new = states.made(optimizer, param, group) if keys else {}
    return {key: new[key] for key in keys}


def _check(
    optimizer: SafeOptimizer,
    name: str,
    param: Tensor,
    group: Group,
    saved: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    missing: set[str],
) -> None:
    """Raise if saved state does not fit a parameter."""
    if states.is_rotated(saved) and not states.is_rotated(shapes):
        raise ValueError(
            f"the saved moments of {name} are in SOAP's eigenbasis; {type(optimizer).__name__} cannot use "
            "them. Start with fresh state instead."
        )
    if missing:
        raise ValueError(
            f"the saved state of {name} has {sorted(saved)} but not {sorted(missing)}; "
            f"{type(optimizer).__name__} can only load optimizers with the state "
            f"{['step', *shapes]}. Start with fresh state instead."
        )
    stacked = optimizer._stacked_keys(group)
    for key, shape in shapes.items():
        _check_tensor(name, key, saved[key], param, shape)
        if is_sharded(param) and is_sharded(saved[key]):
            placements = tuple(param.placements)
            if key in stacked:
                placements = tuple(stacked_placements(param, group["matrix_dims"], by_rows=stacked[key]))
            _check_placement(name, key, saved[key], param, placements)


def _carried(saved: dict[str, Any], keys: tuple[str, ...] | None) -> dict[str, Any]:
    """Wrap a parameter's state for torch's loading; with ``keys``, only the state that is used here."""
    return {
        key: AsSaved(value) if isinstance(value, Tensor) else value
        for key, value in saved.items()
        if keys is None or key in keys
    }


def _check_tensor(name: str, key: str, value: Tensor, param: Tensor, shape: tuple[int, ...]) -> None:
    """Raise if a saved tensor does not fit a parameter."""
    subject = f"the saved {key} of {name}"
    if is_sharded(param) and not is_sharded(value):
        raise ValueError(
            f"{name} is a DTensor and its saved {key} is not; load full states with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards them."
        )
    if is_sharded(value) and not is_sharded(param):
        raise ValueError(
            f"{subject} is a DTensor and the parameter is not; save the full state: "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, full_state_dict=True"
        )
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{subject} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}; parameters must "
            "be in the order in which they were saved."
        )


def _check_placement(
    name: str, key: str, value: DTensor, param: DTensor, expected: tuple[Placement, ...]
) -> None:
    """Raise if a saved tensor is sharded differently than its parameter needs."""
    if tuple(value.placements) != expected:
        where = "" if expected == tuple(param.placements) else f", which needs {expected}"
        raise ValueError(
            f"the saved {key} of {name} is placed as {value.placements}, the parameter as "
            f"{param.placements}{where}; load it with torch.distributed.checkpoint, which changes placements."
        )


def adopted(optimizer: SafeOptimizer, param: Tensor, group: Group, saved: dict[str, Any]) -> dict[str, Any]:
    """Loaded state, converted to this optimizer's dtypes and devices."""
    taken = {}
    keys = optimizer._state_keys(group)
    for key, value in ({"step": 0.0} | saved).items() if saved else ():
        value = value.tensor if isinstance(value, AsSaved) else value
        if key == "step":
            device = optimizer._step_device(param, group)
            value = torch.as_tensor(value, dtype=torch.float32, device=device)
        elif key in keys:
            value = value.to(param.device, optimizer._state_dtype(param, group))
        elif isinstance(value, Tensor):
            value = value.to(param.device)
        taken[key] = value
    return taken


def _listed(sizes: list[int]) -> str:
    """The sizes of groups, without the middle ones where there are many."""
    return ", ".join(map(str, sizes)) if len(sizes) <= 8 else f"{str(sizes[:4])[1:-1]}, ..., {sizes[-1]}"


def _num_parameters(groups: list[Group]) -> list[int]:
    return [len(group["params"]) for group in groups]
