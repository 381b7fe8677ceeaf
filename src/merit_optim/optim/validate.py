"""Checks of user input. Each message gives the value, what is allowed, and the way out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from merit_optim.spelling import did_you_mean


def parameters(params: Any) -> None:
    """Anything but a model. A ParameterList is allowed: it holds only parameters."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(
            f"params is a model ({type(params).__name__}); pass its parameters: param_groups(model), which "
            "turns off weight decay for vectors and knows the kind of each weight"
        )


def model(value: Any) -> None:
    """A model, not its parameters."""
    if not isinstance(value, nn.Module):
        raise TypeError(
            f"model is a {type(value).__name__}; param_groups sorts parameters by name and needs the model "
            "itself"
        )


def overrides(value: Any) -> None:
    """Options by pattern."""
    if not isinstance(value, Mapping) or not all(isinstance(options, Mapping) for options in value.values()):
        raise TypeError(
            f"overrides is {value!r}; it must give options by pattern, such as "
            '{"*embedding*": {"element_wise": False}}'
        )


def saved_state(value: Any) -> None:
    """What ``state_dict`` returns."""
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        raise ValueError(
            f"{value!r:.100} is not the state of an optimizer, which has 'state' and 'param_groups', as "
            "returned by state_dict()"
        )


def num_labels(value: Any) -> None:
    """A number >= 1."""
    if not _is_number(value) or not value >= 1:  # nor NaN
        raise ValueError(f"num_labels is {value!r}; the loss is a mean over at least 1 label")


# How far below zero schedules of torch may end, as LinearLR does for most of its factors.
ROUNDING = 1e-12


def learning_rate(lr: Any, name: str = "lr") -> None:
    """A number or a one-element tensor, at least zero up to rounding."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(  # "Tensor lr must be 1-element" is torch's message, which callers may match
                f"{name} is a tensor of shape {tuple(lr.shape)}. Tensor {name} must be 1-element; for "
                "different rates, set one in each parameter group."
            )
        if lr.requires_grad:
            return  # a learned rate may have any value
        lr = lr.item()
    if isinstance(lr, float) and -ROUNDING < lr < 0:
        return
    at_least_zero(name, lr)


def at_least_zero(name: str, value: Any) -> None:
    """A finite number >= 0."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number that is at least 0")


def positive(name: str, value: Any, otherwise: str) -> None:
    """A number > 0; ``otherwise`` says what to pass instead."""
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{name} is {value!r}; it must be greater than 0, or {otherwise}")


def epsilon(value: Any, default: str, name: str = "eps") -> None:
    """A finite number > 0 that is still normal in float32: it is added to, or bounds, a denominator."""
    positive(name, value, f"the default {default}")
    smallest = torch.finfo(torch.float32).tiny
    if value < smallest:
        raise ValueError(
            f"{name} is {value!r}, too small for float32; it must be at least {smallest:.1e}, or the "
            f"default {default}"
        )
    if value == math.inf:
        raise ValueError(f"eps is {value!r}; it must be finite, or the default {default}")


def betas(value: Any) -> None:
    """Two numbers in [0, 1)."""
    pair = tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in pair):
        raise ValueError(f"betas is {value!r}; it must be two numbers, each at least 0 and less than 1")


def fraction(name: str, value: Any, otherwise: str = "") -> None:
    """A number in [0, 1); ``otherwise`` says what else is allowed."""
    if not _is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}; it must be at least 0 and less than 1{otherwise}")


def coefficients(name: str, value: Any, known: Collection[str]) -> None:
    """A known name, three numbers, or one or more such triples."""
    if isinstance(value, str) and value in known:
        return
    triples = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    triples = (triples,) if triples and _is_number(triples[0]) else triples
    if not triples or not all(_is_triple(triple) for triple in triples):
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}, or the numbers (a, b, c) "
            "of a*x + b*x**3 + c*x**5, or one such triple for each step"
        )


def _is_triple(value: Any) -> bool:
    numbers_only = isinstance(value, Sequence) and not isinstance(value, str)
    return numbers_only and len(value) == 3 and all(_is_number(x) and math.isfinite(x) for x in value)


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """One of the allowed values."""
    if value not in allowed:
        hint = did_you_mean(value, [known for known in allowed if isinstance(known, str)], otherwise="")
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}{hint}")


def flag(name: str, value: Any, otherwise: str = "") -> None:
    """True or False; ``otherwise`` says what else is allowed."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False{otherwise}")


def count(name: str, value: Any, otherwise: str = "") -> None:
    """A whole number >= 1; ``otherwise`` says what else is allowed."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number that is at least 1{otherwise}")


def phase(name: str, value: Any, length: int) -> None:
    """The index of a step in a cycle of this length."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < length:
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number from 0 to {length - 1}, a step of the cycle of "
            f"precondition_frequency={length}, or None to let matrices take turns"
        )


def optional_count(name: str, value: Any) -> None:
    """A whole number >= 1, or None."""
    if value is not None:
        count(name, value, ", or None")


def split(name: str, value: Any) -> None:
    """None, a number of equal parts, or the size of each part."""
    sizes = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if value is not None and not (sizes and all(type(size) is int and size >= 1 for size in sizes)):
        raise ValueError(
            f"{name} is {value!r}; it must be the number of equal parts, such as 3, or the size of each, "
            "such as (768, 256, 256), or None"
        )


def bounds(name: str, value: Any) -> None:
    """None, or two numbers with 0 <= smallest <= largest."""
    pair = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if value is not None and not (len(pair) == 2 and all(map(_is_number, pair)) and 0 <= pair[0] <= pair[1]):
        raise ValueError(
            f"{name} is {value!r}; it must be the smallest and the largest ratio, such as (0.1, 5.0), or None"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def has_shape(name: str, param: Tensor) -> None:
    """Not a lazy parameter, whose ndim is 1 before its shape is known."""
    if is_lazy(param):
        raise ValueError(
            f"{name} has no shape yet; its kind and its weight decay are known after one forward pass of the "
            "model"
        )


def kind_of(value: Any, allowed: Sequence[str]) -> None:
    """Kinds of weights by pattern."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f'kind_of is {value!r}; it must give the kind of a weight by pattern, such as {{"*.gate.weight": '
            '"vector"}'
        )
    for pattern, kind in value.items():
        one_of(f"the kind for {pattern!r}", kind, allowed)


def groups(value: Any) -> None:
    """Parameter groups with lists of parameters."""
    fits = isinstance(value, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in value
    )
    if not fits or not all(isinstance(param, Tensor) for group in value for param in group["params"]):
        raise TypeError(
            f"groups is {value!r:.100}; it must be an optimizer, or parameter groups with lists of "
            "parameters, such as param_groups(model)"
        )
