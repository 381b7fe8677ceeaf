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


class Item(NamedTuple):
    """One parameter that takes part in a step."""

    name: str
    param: Tensor
    grad: Tensor
    step: Tensor
    state: tuple[Tensor, ...]
    """In the order of the optimizer's ``STATE_KEYS``."""
    group: dict[str, Any]
    """The parameter group it belongs to: learning rate, betas and all other options."""


Controls = dict[torch.device, Control]


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
        grad = grad * control.gradient_scale
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


def update_each(items: list[Item], controls: Controls, rule: Callable[..., tuple[Tensor, ...]]) -> None:
    """Replace each weight and its state by ``rule(item, weight, gradient, *state)``, a pure function."""
    for item in items:
        control = controls[item.param.device]
        stored = (item.param, *item.state)
        # Autograd keeps what the rule read, so what is overwritten must be another tensor.
        before = [x.clone() for x in stored] if torch.is_grad_enabled() else stored
        grad = prepared_gradient(item, compute_dtype(item.param), control)
        after = rule(item, before[0], grad, *before[1:])
        for old, new in zip(stored, after, strict=True):
            store(old, new, control.skip)
