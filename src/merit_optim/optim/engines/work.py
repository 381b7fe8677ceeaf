"""What a step works on: the tensors of each parameter, and what its group says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.algorithm import compute_dtype


class Control(NamedTuple):
    """What happens to the gradients of one device, decided on that device without asking the host."""

    gradient_scale: Tensor | None = None
    """Multiplies every gradient before use: loss scaling undone, and the gradient norm clipped."""
    skip: Tensor | None = None
    """A 0-d bool: true leaves every parameter and all state as they are."""


class Work(NamedTuple):
    """The parameters of one group that take part in a step, tensor by tensor in parallel lists."""

    group_index: int
    group: dict[str, Any]
    owners: list[Tensor]
    """The parameters as the group has them."""
    params: list[Tensor]
    """What the step changes: the same, or where they are sharded, this rank's own part."""
    grads: list[Tensor]
    steps: list[Tensor]
    states: list[list[Tensor]]
    """One list for each of the optimizer's ``STATE_KEYS``."""


class Item(NamedTuple):
    """One parameter of a ``Work``."""

    group_index: int
    param: Tensor
    grad: Tensor
    step: Tensor
    state: tuple[Tensor, ...]
    """In the order of the optimizer's ``STATE_KEYS``."""
    group: dict[str, Any]
    """The parameter group it belongs to: learning rate, betas and all other options."""
    owner: Tensor
    """The parameter as the group has it."""

    @property
    def name(self) -> str:
        """What messages and statistics call it; found when it is asked for, which is seldom."""
        place = next(i for i, param in enumerate(self.group["params"]) if param is self.owner)
        return name_of(self.group_index, self.group, place)


Controls = dict[torch.device, Control]


def by_device(works: list[Work]) -> dict[torch.device, list[Work]]:
    """The same work, each device's apart."""
    devices = dict.fromkeys([param.device for work in works for param in work.params])  # keeps their order
    if len(devices) == 1:
        return {next(iter(devices)): works}
    found: dict[torch.device, list[Work]] = {device: [] for device in devices}
    for work in works:
        for device, on_device in found.items():
            if keep := [i for i, param in enumerate(work.params) if param.device == device]:
                on_device.append(pick(work, keep))
    return found


def apart(works: list[Work], controls: Controls) -> dict[torch.device, list[Work]]:
    """The same, where the controls know the devices already: looking at every parameter takes time."""
    return by_device(works) if len(controls) > 1 else dict.fromkeys(controls, works)


def pick(work: Work, keep: list[int]) -> Work:
    """Some of a group's parameters."""
    owners, params, grads, steps = (
        [x[i] for i in keep] for x in (work.owners, work.params, work.grads, work.steps)
    )
    states = [[x[i] for i in keep] for x in work.states]
    return Work(work.group_index, work.group, owners, params, grads, steps, states)


def name_of(group_index: int, group: dict[str, Any], place: int) -> str:
    """The name given with a parameter, or its place."""
    names = group.get("param_names")
    return names[place] if names else f"parameter {place} of group {group_index}"


def names_of(work: Work) -> list[str]:
    """What messages and statistics call the parameters."""
    position = {param: i for i, param in enumerate(work.group["params"])}
    return [name_of(work.group_index, work.group, position[param]) for param in work.owners]


def items_of(works: list[Work]) -> list[Item]:
    """The parameters one by one."""
    return [
        Item(work.group_index, param, grad, step, tuple(state), work.group, owner)
        for work in works
        for owner, param, grad, step, *state in zip(
            work.owners, work.params, work.grads, work.steps, *work.states, strict=True
        )
    ]


def store(stored: Tensor, computed: Tensor, skip: Tensor | None) -> None:
    """Write a result back, unless it was computed in place or the step is skipped."""
    if computed is stored:
        return
    if skip is not None:
        computed = torch.where(skip, stored, computed.to(stored.dtype))
    stored.copy_(computed)


def prepared_gradient(item: Item, dtype: torch.dtype, control: Control) -> Tensor:
    """The gradient as the moments see it: in ``dtype``, scaled, and turned round to maximize."""
    grad = item.grad.to(dtype)
    if control.gradient_scale is not None:
        grad = grad * control.gradient_scale.to(dtype)  # whose dtype a gradient without dimensions would take
    return -grad if item.group["maximize"] else grad


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A learning rate ready for arithmetic on ``device``: a number, or a 0-d tensor there.

    A tensor on the CPU is read, which costs nothing, except inside ``torch.compile``, where reading it
    would bake the number into the program.
    """
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and not torch.compiler.is_compiling() and not value.requires_grad:
        return value.item()
    return value.reshape(()).to(device, non_blocking=True)


def update_each(works: list[Work], controls: Controls, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Replace each weight and its state by ``rule(item, weight, gradient, *state)``, a pure function."""
    for item in items_of(works):
        control = controls[item.param.device]
        stored = (item.param, *item.state)
        # Autograd keeps what the rule read, so what is overwritten must be another tensor.
        before = [x.clone() for x in stored] if torch.is_grad_enabled() else stored
        grad = prepared_gradient(item, compute_dtype(item.param), control)
        after = rule(item, before[0], grad, *before[1:])
        for old, new in zip(stored, after, strict=True):
            store(old, new, control.skip)
