"""The optimizer of a run: create it from the configuration, and record its updates."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_lab.models import Model, build
from merit_lab.train.by_kind import merged, of_kinds, with_rate_scale, with_whole_rates
from merit_lab.train.config import TrainConfig
from merit_lab.train.optimizer_options import check_known, class_of, fitted_options, is_external, takes
from merit_lab.train.parallel import Ranks
from merit_lab.train.steps import AnyOptimizer, OptimizerPair, parts_of, weights_of
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.family import Family
from merit_optim.optim.groups import param_groups
from merit_optim.optim.kinds import KINDS, Kind
from merit_optim.optim.registry import create
from merit_optim.optim.sophia import SophiaG, sampled_label_loss
from merit_optim.optim.statistics import UpdateStatistics

# Several float32 copies of their logits are in memory at once: 1.6 GB each for GPT-2's vocabulary.
_CURVATURE_TOKENS = 8192

_NOT_HIDDEN = [kind for kind in KINDS if kind != "hidden"]

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "clip": {"clip": None},
    "weight-bound": {"weight_bound": False},
    "element-wise": {"element_wise": False},
}


def create_optimizer(config: TrainConfig, model: Model) -> AnyOptimizer:
    """Return the configured optimizer for a model that is already placed or sharded on the ranks."""
    chosen = config.optimizer
    fixed: dict[str, Any] = {} if chosen.betas is None else {"betas": chosen.betas}
    for part in chosen.without:
        fixed |= _LEFT_OUT[part]
    user = with_rate_scale(chosen.name, chosen.rate_scale, chosen.options_by_name())
    first = _Part(chosen.name, chosen.lr, fixed, user, "optimizer.options")
    if chosen.rest is None:
        return first.create(config, model, KINDS)
    rest = _Part(chosen.rest, chosen.rest_lr, {}, chosen.rest_options_by_name(), "optimizer.rest_options")
    return OptimizerPair(first.create(config, model, ["hidden"]), rest.create(config, model, _NOT_HIDDEN))


@dataclass(frozen=True)
class _Part:
    """An optimizer to be created for all or some weights of a model.

    ``fixed`` are options that other fields imply, ``user`` those that the user wrote in ``field``.
    """

    name: str
    lr: float | None
    fixed: dict[str, Any]
    user: dict[str, Any]
    field: str

    def create(self, config: TrainConfig, model: Model, kinds: Collection[Kind]) -> Optimizer:
        """Return the optimizer for the weights of these kinds."""
        cls, chosen = class_of(self.name), config.optimizer
        is_ours = _is_ours(cls)  # those check values and gradients themselves
        check_known(cls, self.user, self.field)
        user = self.user if is_ours else fitted_options(cls, self.user, self.field)
        options = {"lr": self.lr, **self.fixed, **user}
        if cls is torch.optim.AdamW:
            options.setdefault("fused", True)
        if next(model.parameters()).is_meta:  # torch refuses fused there
            options.pop("fused", None)
        if is_ours:
            alone = chosen.rest is None  # otherwise the gradients of both are clipped together
            options["max_grad_norm"] = chosen.max_grad_norm if alone else None
            options["nonfinite"] = "skip" if alone and config.nonfinite == "skip" else "propagate"
        # Without weight decay all weights form one group, which some optimizers require.
        decay = chosen.weight_decay if takes(cls, "weight_decay") else 0.0
        overrides = chosen.overrides_by_pattern()
        overrides = with_whole_rates(overrides) if is_ours else overrides
        groups = of_kinds(param_groups(model, decay, overrides=overrides), kinds)
        optimizer = self._construct(cls, groups, options)
        if not is_ours:
            check_known(cls, user, self.field, used=optimizer.defaults)
        for pattern, override in overrides.items():
            used = {name: value for name, value in override.items() if any(name in one for one in groups)}
            self._check_override(pattern, used, optimizer, options)
        return optimizer

    def _construct(
        self, cls: Callable[..., Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
    ) -> Optimizer:
        """Construct the optimizer; explain errors."""
        make = cls if is_external(self.name) else partial(create, self.name)
        try:
            optimizer = make(groups if _takes_kinds(cls) else merged(groups), **options)
        except Exception as error:  # an external class may raise anything
            if "use_muon" in str(error) and not any("use_muon" in group for group in groups):
                return self._construct(cls, _sorted_for_muon(groups), options)
            if not (is_external(self.name) or isinstance(error, TypeError)):
                raise
            raise ValueError(
                f"{self.name} refuses its arguments, parameter groups and {', '.join(options)}: {error}. "
                "Give missing ones in optimizer.options; if it supports only matrices, name another for the "
                "rest, as in --optimizer.rest adamw"
            ) from error
        if any("lr" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"{self.name} has no lr in its parameter groups, which the schedule has to set; choose "
                "another"
            )
        return optimizer

    def _check_override(
        self, pattern: str, used: dict[str, Any], optimizer: Optimizer, options: dict[str, Any]
    ) -> None:
        """Raise ValueError on an override that the optimizer does not have, or whose value it refuses."""
        is_ours = isinstance(optimizer, SafeOptimizer)
        known = optimizer.defaults.keys()
        if unknown := sorted(used.keys() - known):
            raise ValueError(
                f"optimizer.overrides sets {unknown[0]}, which {self.name} does not have; it has "
                f"{', '.join(sorted(known))}"
            )
        try:
            if not is_ours:  # torch's refuse some values as arguments, but not in parameter groups
                class_of(self.name)(weights_of(optimizer), **options | used)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"optimizer.overrides sets {used} for {pattern!r}, which {self.name} refuses: {error}"
            ) from error


def _is_ours(cls: Callable[..., Optimizer]) -> bool:
    return isinstance(cls, type) and issubclass(cls, SafeOptimizer)


def _takes_kinds(cls: Callable[..., Optimizer]) -> bool:
    """Whether groups may say their kind: a user's function may hand them to an optimizer of ours."""
    return _is_ours(cls) or inspect.isfunction(cls)


def _sorted_for_muon(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups with ``use_muon``, for implementations of Muon with a built-in AdamW for the rest."""
    hidden = [{**group, "use_muon": True} for group in of_kinds(groups, ["hidden"])]
    others = [{**group, "use_muon": False} for group in of_kinds(groups, _NOT_HIDDEN)]
    return [*hidden, *others]


def options_in_use(config: TrainConfig) -> list[dict[str, Any]]:
    """Return the options of each parameter group, defaults included, as JSON can have them.

    A configuration names what was set. Defaults change between versions, so records have these too. Raises
    ValueError if the optimizer cannot be created as configured. This needs no memory.
    """
    with torch.device("meta"):
        optimizer = create_optimizer(config, build(config.model))
    groups = [group for part in parts_of(optimizer) for group in part.param_groups]
    return [
        {
            name: value if isinstance(value, bool | int | float | str | tuple | list | None) else str(value)
            for name, value in group.items()
            if not name.startswith("param")
        }
        for group in groups
    ]


@contextlib.contextmanager
def update_recorded(optimizer: AnyOptimizer, wanted: bool) -> Iterator[list[dict[str, UpdateStatistics]]]:
    """Record what the step inside does to each parameter; empty if not wanted or not supported."""
    with contextlib.ExitStack() as recordings:
        yield [
            recordings.enter_context(part.recording())
            for part in parts_of(optimizer)
            if wanted and isinstance(part, Family)
        ]


def describe(recorded: list[dict[str, UpdateStatistics]]) -> dict[str, dict[str, float]]:
    """Return update statistics in the format of the metrics."""
    return {
        name: {
            "clipped": update.clipped,
            "bounded": update.bounded,
            "smallest_ratio": update.smallest_ratio.item(),
            "largest_ratio": update.largest_ratio.item(),
            "relative_change": update.relative_change,
        }
        for statistics in recorded
        for name, update in statistics.items()
    }


def update_curvature(
    optimizer: AnyOptimizer, module: nn.Module, inputs: Tensor, config: TrainConfig, ranks: Ranks, step: int
) -> None:
    """Update Sophia-G's estimate of the curvature, in the steps that need one.

    It uses the first sequences of each rank's first micro-batch. Each step and rank has a separate generator
    for the labels, so that a resumed run draws the same.
    """
    for part in parts_of(optimizer):
        if not isinstance(part, SophiaG) or step % part.hessian_interval:
            continue
        inputs = inputs[: max(1, _CURVATURE_TOKENS // inputs.shape[1])]
        drawn = hashlib.blake2b(f"labels {config.seed} {step} {ranks.rank}".encode(), digest_size=7).digest()
        generator = torch.Generator(inputs.device).manual_seed(int.from_bytes(drawn, "little"))
        sampled_label_loss(module(inputs).logits, generator).backward()
        part.update_hessian(num_labels=inputs.numel() * ranks.size)
        optimizer.zero_grad()
