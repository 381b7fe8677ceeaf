"""The state of a parameter: how it is made, and whether it fits the options of its group."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from merit_optim.optim.engines.ranks.placements import is_sharded, stacked_zeros

if TYPE_CHECKING:
    from merit_optim.optim.base import SafeOptimizer


def made(optimizer: SafeOptimizer, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """New state, of zeros: the step count, and the tensors that the group's options require."""
    device = optimizer._step_device(param, group)
    if device.type == "cpu":  # the host reads it, and FakeTensorMode knows values of torch.tensor alone
        state = {"step": torch.tensor(0.0, dtype=torch.float32, device=device)}
    else:
        state = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    dtype, stacked = optimizer._state_dtype(param, group), optimizer._stacked_keys(group)
    for key, shape in optimizer._state_shapes(param, group).items():
        if key not in stacked:  # with the parameter's placement and layout
            state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif is_sharded(param):
            state[key] = stacked_zeros(param, group["matrix_dims"], shape, dtype, by_rows=stacked[key])
        else:
            state[key] = torch.zeros(shape, dtype=dtype, device=param.device)
    return state


def check_fits(optimizer: SafeOptimizer, index: int, name: str, param: Tensor) -> None:
    """Raise if the state of a parameter does not fit the options of its group, which have changed."""
    state, group = optimizer.state[param], optimizer.param_groups[index]
    shapes = optimizer._state_shapes(param, group)
    if is_rotated(state) and not is_rotated(shapes):
        raise ValueError(
            f"the direction of parameter group {index} was changed, and the moments of {name} are in "
            "SOAP's eigenbasis. Change it back, or create a new optimizer for the parameter."
        )
    if missing := shapes.keys() - state.keys():
        raise ValueError(
            f"with the options of parameter group {index}, {name} needs the state {sorted(missing)}, and it "
            f"has {sorted(state)} (this depends on direction, neuron_beta and calibrated). If the options "
            "were changed, change them back; if the state was another optimizer's, begin anew: del "
            "optimizer.state[param]."
        )
    for key, shape in shapes.items():
        if tuple(state[key].shape) != shape:
            raise ValueError(
                f"the {key} of {name} has shape {tuple(state[key].shape)}, and with the options of "
                f"parameter group {index} it needs {shape} (this depends on matrix_dims, transposed "
                "and max_precond_dim). Change them back, or create a new optimizer for the parameter."
            )


def is_rotated(keys: Collection[str]) -> bool:
    """Whether state with these keys has moments in an eigenbasis, under the names of Adam's."""
    return "row_basis" in keys
