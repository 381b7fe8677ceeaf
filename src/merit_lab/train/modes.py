"""Optimizers with two sets of weights, one to train and one to evaluate, such as schedule-free ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from merit_lab.train.closure import weights_of
from merit_lab.train.pair import AnyOptimizer, parts_of
from merit_lab.train.parallel import drop_gathered


def has_modes(optimizer: AnyOptimizer) -> bool:
    """Whether ``optimizer.eval()`` switches to other weights than those that are trained."""
    return any(_has_modes(part) for part in parts_of(optimizer))


@contextlib.contextmanager
def weights_to_use(optimizer: AnyOptimizer, module: nn.Module) -> Iterator[list[Tensor]]:
    """Give the model its evaluation weights inside the context, and restore the trained ones bit for bit.

    Yields copies of the trained weights: switching back with ``optimizer.train()`` would round them.
    Optimizers without modes have one set of weights; for them the list is empty.
    """
    parts = [part for part in parts_of(optimizer) if _has_modes(part)]
    weights = [weight for part in parts for weight in weights_of(part)]
    trained = [weight.detach().clone() for weight in weights]
    # Before the first step there is only one set of weights.
    switched: list[Any] = [part for part in parts if any(part.state.values())]
    for part in switched:
        part.eval()
    if parts:
        drop_gathered(module)
    try:
        yield trained
    finally:
        for part in switched:
            part.train()
        copy_into(weights, trained)
        if parts:
            drop_gathered(module)


@torch.no_grad()
def copy_into(weights: list[Tensor], values: list[Tensor]) -> None:
    """Copy ``values`` into ``weights``."""
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


def _has_modes(part: object) -> bool:
    return all(callable(getattr(part, mode, None)) for mode in ("train", "eval"))
