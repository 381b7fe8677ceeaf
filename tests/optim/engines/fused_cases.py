"""Shared by the tests of the fused engine: pairs of optimizers, and comparison in ulps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor, nn

from merit_optim import MERIT
from merit_optim.optim.engines.fused.engine import FusedEngine
from merit_optim.optim.engines.fused.tables import Tile
from merit_optim.optim.family import Family

ULPS = 8
"""The largest allowed difference of float32 results in one step. In the interpreter at most 1.25 was seen; a
GPU rounds products and sums together and divides to two ulps."""

SMALL_TILE = Tile(rows=8, columns=16, steps=1, warps=1)
"""Gives small tensors several tiles. In the interpreter a program costs the same at any size."""

Build = Callable[..., Family]


@contextmanager
def tiles(moments: Tile = SMALL_TILE, apply: Tile = SMALL_TILE) -> Iterator[None]:
    """Optimizers that take their first step inside use these tiles."""
    with mock.patch.multiple(FusedEngine, moments_tile=moments, apply_tile=apply):
        yield


def assert_within_ulps(actual: Tensor, expected: Tensor, ulps: float, label: str = "") -> None:
    """Check that tensors differ by at most ``ulps`` of the largest element, with equal NaN and infinities.

    Of the largest element, because both engines add terms of either sign: if those cancel, the result has
    their absolute error.
    """
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), label
    if not actual.numel():
        return
    a, b = actual.detach().double(), expected.detach().double()
    finite = b.isfinite()
    assert_same_bits(a.masked_fill(finite, 0).nan_to_num(), b.masked_fill(finite, 0).nan_to_num(), label)
    assert torch.equal(a.isnan(), b.isnan()), f"{label}: NaN in other places"
    a, b = a.masked_fill(~finite, 0), b.masked_fill(~finite, 0)
    ulp = torch.finfo(actual.dtype).eps * b.abs().amax()
    apart = (a - b).abs().amax()
    assert apart <= ulps * ulp, f"{label}: {float(apart / ulp):.1f} ulps apart, not {ulps}"


def allowed(x: Tensor) -> int:
    """The number of ulps by which the engines may differ."""
    return ULPS if x.dtype == torch.float32 else 1


class Pair:
    """An optimizer on the fused engine and one on the eager engine, with the same weights."""

    def __init__(
        self,
        params: Sequence[Tensor],
        build: Build = MERIT,
        groups: Sequence[dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self.params = list(params)
        self.eager_params = [copy.deepcopy(p) for p in params]
        self.fused = self._build(build, self.params, groups, fused=True, **options)
        self.eager = self._build(build, self.eager_params, groups, fused=False, **options)
        self.num_steps = 0

    @staticmethod
    def _build(
        build: Build, params: list[Tensor], groups: Sequence[dict[str, Any]] | None, **options: Any
    ) -> Family:
        """Each group gets the parameters of its "params", a slice."""
        if groups is None:
            return build(params, **options)
        return build([{**group, "params": params[group["params"]]} for group in groups], **options)

    @property
    def engine(self) -> FusedEngine:
        (engine,) = (self.fused._engines or {}).values()
        return engine

    def set_gradients(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Set the same gradients for both: ``grads``, or random ones in new tensors."""
        if grads is None:
            grads = [gradient(p, 100 * self.num_steps + i) for i, p in enumerate(self.params)]
        for param, eager_param, grad in zip(self.params, self.eager_params, grads, strict=True):
            param.grad, eager_param.grad = grad, grad

    def step(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Take and compare a step of both; then the eager one continues from the fused one's result."""
        self.set_gradients(grads)
        self.fused.step()
        self.eager.step()
        self.num_steps += 1
        self.compare()

    def compare(self) -> None:
        """Half-precision results may be rounded to either side: one ulp."""
        for i, (param, eager_param) in enumerate(zip(self.params, self.eager_params, strict=True)):
            where = f"parameter {i} of shape {tuple(param.shape)} after step {self.num_steps}"
            assert_within_ulps(param, eager_param, allowed(param), where)
            state, eager_state = (
                optimizer.state.get(p) or {}
                for optimizer, p in ((self.fused, param), (self.eager, eager_param))
            )
            assert state.keys() == eager_state.keys(), where
            for key, value in state.items():
                same_place = value.to(eager_state[key].device)  # step counts may be elsewhere
                assert_within_ulps(same_place, eager_state[key], allowed(value), f"{key} of {where}")
                eager_state[key].copy_(value)
            eager_param.data.copy_(param.data)


def parameters(
    shapes: Sequence[Sequence[int]],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.5,
) -> list[nn.Parameter]:
    """Random weights."""
    return [
        nn.Parameter(random_tensor(s, i, scale=scale, dtype=dtype, device=device))
        for i, s in enumerate(shapes)
    ]


def gradient(param: Tensor, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """A random gradient: a new, contiguous tensor."""
    return random_tensor(param.shape, 1000 + seed, dtype=dtype or param.dtype, device=param.device)
