"""The input of a step: the tensors of each parameter, and what is to be done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from merit_optim.optim.algorithm import compute_dtype
from merit_optim.optim.torch_private import foreach_add_, is_fake


class Control(NamedTuple):
    """How the gradients of one device are treated. Decided on the device, without a host sync."""

    gradient_scale: Tensor | None = None
    """A factor for every gradient: undoes loss scaling and clips the gradient norm."""
    skip: Tensor | None = None
    """A 0-d bool. If true, no parameter and no state changes."""


class Names(NamedTuple):
    """What the parameters of a group are called in messages and statistics."""

    group_index: int
    params: Sequence[Tensor]
    given: Sequence[str]

    @staticmethod
    def of(group_index: int, group: Mapping[str, Any]) -> Names:
        """The names that a parameter group has, or none."""
        return Names(group_index, group["params"], group.get("param_names") or ())

    def at(self, place: int) -> str:
        """The name given with a parameter, or a description of its place."""
        # Some libraries, such as ZeroRedundancyOptimizer, change the parameters of a group alone.
        fits = len(self.given) == len(self.params)
        return self.given[place] if fits else f"parameter {place} of group {self.group_index}"


class Work(NamedTuple):
    """The parameters of one group that take part in a step, as parallel lists of tensors."""

    names: Names
    spec: Any
    """What is done to them: a ``Spec``, or the options of an optimizer outside the family."""
    lr: float | Tensor
    weight_decay: float
    originals: list[Tensor]
    """The parameters as the group lists them."""
    params: list[Tensor]
    """The tensors to change: the originals, or this rank's shards of them."""
    grads: list[Tensor]
    steps: list[Tensor]
    states: list[list[Tensor]]
    """One list for each state tensor of a parameter."""


class Item(NamedTuple):
    """One parameter of a ``Work``."""

    names: Names
    spec: Any
    lr: float | Tensor
    weight_decay: float
    param: Tensor
    grad: Tensor
    step: Tensor
    state: tuple[Tensor, ...]
    """In the order of the spec's keys."""
    original: Tensor
    """The parameter as the group lists it."""

    @property
    def name(self) -> str:
        """The name in messages and statistics. Searched on demand, because it is rarely needed."""
        return self.names.at(next(i for i, param in enumerate(self.names.params) if param is self.original))


Controls = dict[torch.device, Control]


def by_device(works: list[Work]) -> dict[torch.device, list[Work]]:
    """Divide the work by device."""
    devices = dict.fromkeys([param.device for work in works for param in work.params])  # keeps their order
    if len(devices) == 1:
        return {next(iter(devices)): works}
    divided: dict[torch.device, list[Work]] = {device: [] for device in devices}
    for work in works:
        for device, on_device in divided.items():
            if keep := [i for i, param in enumerate(work.params) if param.device == device]:
                on_device.append(pick(work, keep))
    return divided


def apart(works: list[Work], controls: Controls) -> dict[torch.device, list[Work]]:
    """Divide the work by device. If the controls know a single device, no parameter is looked at."""
    return by_device(works) if len(controls) > 1 else dict.fromkeys(controls, works)


def count_step(works: list[Work], controls: Controls) -> None:
    """Increase the step counts of all parameters, unless the step is skipped."""
    for device, on_device in apart(works, controls).items():
        skip = controls[device].skip
        steps = [step for work in on_device for step in work.steps]
        if not steps:
            continue
        if skip is None:
            foreach_add_(steps, 1)
        else:
            taken = (~skip).float()
            for place in dict.fromkeys([step.device for step in steps]):  # SOAP's are on the host
                there = [step for step in steps if step.device == place]
                foreach_add_(there, [taken.to(place)] * len(there))


def pick(work: Work, keep: list[int]) -> Work:
    """Return the work for some of its parameters."""
    originals, params, grads, steps = (
        [x[i] for i in keep] for x in (work.originals, work.params, work.grads, work.steps)
    )
    states = [[x[i] for i in keep] for x in work.states]
    return work._replace(originals=originals, params=params, grads=grads, steps=steps, states=states)


def originals_of(works: Sequence[Work]) -> list[Tensor]:
    """Return the parameters of all works as their groups list them."""
    return [original for work in works for original in work.originals]


def names_of(work: Work) -> list[str]:
    """Return the names of the parameters in messages and statistics."""
    position = {param: i for i, param in enumerate(work.names.params)}
    return [work.names.at(position[param]) for param in work.originals]


def items_of(works: list[Work]) -> list[Item]:
    """Return the parameters of all works, one by one."""
    return [
        Item(
            work.names,
            work.spec,
            work.lr,
            work.weight_decay,
            param,
            grad,
            step,
            tuple(state),
            original,
        )
        for work in works
        for original, param, grad, step, *state in zip(
            work.originals, work.params, work.grads, work.steps, *work.states, strict=True
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
    """Return the gradient as the direction uses it: in ``dtype``, scaled, and negated to maximize."""
    grad = item.grad.to(dtype)
    if control.gradient_scale is not None:
        # In dtype, because the product of two 0-d tensors has the wider of their dtypes.
        grad = grad * control.gradient_scale.to(dtype)
    return -grad if item.spec.maximize else grad


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a learning rate for arithmetic on ``device``: a number, or a 0-d tensor there.

    A tensor on the CPU is read, which costs nothing. Inside ``torch.compile`` it is not, because its value
    would become a constant of the program.
    """
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and not torch.compiler.is_compiling() and not value.requires_grad:
        return value.item()
    return moved(value.reshape(()), device)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device without waiting; on the host, which would read it too early, after waiting."""
    return x.to(device, non_blocking=device.type != "cpu")


def is_true(flag: Tensor, *, if_fake: bool) -> bool:
    """Return the value of a flag, which the host waits for. A fake one has none: return ``if_fake``."""
    return if_fake if is_fake(flag) else bool(flag)


def update_each(works: list[Work], controls: Controls, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Replace each weight and its state by ``rule(item, weight, gradient, *state)``, a pure function."""
    for item in items_of(works):
        control = controls[item.param.device]
        stored = (item.param, *item.state)
        # Autograd saves the rule's inputs, so the overwritten tensors must be others.
        before = [x.clone() for x in stored] if torch.is_grad_enabled() else stored
        grad = prepared_gradient(item, compute_dtype(item.param), control)
        after = rule(item, before[0], grad, *before[1:])
        for old, new in zip(stored, after, strict=True):
            store(old, new, control.skip)
