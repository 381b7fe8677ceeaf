"""The optimizer of a run: made from its configuration, stepped, and asked what its update did."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from merit_lab.models import LanguageModel, build
from merit_lab.train.config import TrainConfig
from merit_lab.train.gradients import clip_gradients
from merit_lab.train.own_optimizer import construct, is_own, load_class
from merit_lab.train.parallel import Ranks
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.groups import param_groups
from merit_optim.optim.options import LATER
from merit_optim.optim.registry import OPTIMIZERS, create
from merit_optim.optim.sophia import SophiaG, sampled_label_loss
from merit_optim.optim.statistics import UpdateStatistics
from merit_optim.optim.trust import TrustRatioOptimizer

# Their logits are held in float32 all at once, several times over: 1.6 GB each for GPT-2's vocabulary.
_CURVATURE_TOKENS = 8192

_LEFT_OUT: dict[str, dict[str, Any]] = {
    "clip": {"clip": None},
    "weight-bound": {"weight_bound": False},
    "element-wise": {"element_wise": False},
}


def create_optimizer(config: TrainConfig, model: LanguageModel) -> Optimizer:
    """The configured optimizer over a model that has been shared among the ranks already."""
    chosen = config.optimizer
    cls = load_class(chosen.name) if is_own(chosen.name) else OPTIMIZERS[chosen.name].optimizer
    options: dict[str, Any] = {"lr": chosen.lr}
    if chosen.betas is not None:
        options["betas"] = chosen.betas
    for part in chosen.without:
        options |= _LEFT_OUT[part]
    options |= chosen.options_by_name()
    if cls is torch.optim.AdamW:
        options["fused"] = not next(model.parameters()).is_meta  # torch refuses it there
    if isinstance(cls, type) and issubclass(cls, SafeOptimizer):
        options["max_grad_norm"] = chosen.max_grad_norm
        options["nonfinite"] = "skip" if config.nonfinite == "skip" else "propagate"
    overrides = chosen.overrides_by_pattern()
    groups = param_groups(model, chosen.weight_decay, overrides=overrides)
    make = cls if is_own(chosen.name) else partial(create, chosen.name)
    optimizer = construct(make, groups, options, chosen.name)
    known = {*optimizer.defaults, *(LATER if isinstance(optimizer, TrustRatioOptimizer) else ())}
    for option in {option for own in overrides.values() for option in own}:
        if option not in known:
            raise ValueError(
                f"optimizer.overrides sets {option}, which {chosen.name} does not have; it has "
                f"{', '.join(sorted(known))}"
            )
    if not isinstance(optimizer, SafeOptimizer):
        _check_overrides(cls, list(model.parameters()), options, overrides)
    return optimizer


def check_optimizer(config: TrainConfig) -> None:
    """Raise where the optimizer cannot be made as configured; no memory is needed to find out."""
    with torch.device("meta"):
        create_optimizer(config, build(config.model))


def _check_overrides(
    cls: Callable[..., Optimizer],
    parameters: list[Tensor],
    options: dict[str, Any],
    overrides: dict[str, dict[str, Any]],
) -> None:
    """Raise on values that torch's optimizers refuse as arguments, and let pass in a parameter group."""
    for pattern, own in overrides.items():
        try:
            cls(parameters, **options | own)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"optimizer.overrides sets {own} for {pattern!r}, which {cls.__name__} refuses: {error}"
            ) from error


def take_step(optimizer: Optimizer, config: TrainConfig, norms: Tensor, parameters: Sequence[Tensor]) -> None:
    """Step, with gradients clipped and a bad step left out as configured.

    The optimizers of this package do both themselves; for torch's own it is done here.
    """
    if not isinstance(optimizer, SafeOptimizer):
        norm = torch.linalg.vector_norm(norms)
        if config.nonfinite == "skip" and not norm.isfinite():
            return
        if config.optimizer.max_grad_norm is not None:
            clip_gradients(parameters, norm, config.optimizer.max_grad_norm)
    optimizer.step()


@contextlib.contextmanager
def update_recorded(optimizer: Optimizer, wanted: bool) -> Iterator[dict[str, UpdateStatistics]]:
    """What the step inside did to each parameter; empty where it is not wanted or not known."""
    if wanted and isinstance(optimizer, TrustRatioOptimizer):
        with optimizer.recording() as statistics:
            yield statistics
    else:
        yield {}


def describe(statistics: dict[str, UpdateStatistics]) -> dict[str, dict[str, float]]:
    """Update statistics as the metrics have them."""
    return {
        name: {
            "clipped": update.clipped,
            "bounded": update.bounded,
            "smallest_ratio": update.smallest_ratio.item(),
            "largest_ratio": update.largest_ratio.item(),
            "relative_change": update.relative_change,
        }
        for name, update in statistics.items()
    }


def update_curvature(
    optimizer: Optimizer, module: nn.Module, inputs: Tensor, config: TrainConfig, ranks: Ranks, step: int
) -> None:
    """Give Sophia-G its estimate of the curvature, in the steps that want one.

    It is made on the first sequences of each rank's first micro-batch. The labels are drawn by a
    generator of their own for each step and rank, so that a resumed run draws the same.
    """
    if not isinstance(optimizer, SophiaG) or step % optimizer.hessian_interval:
        return
    inputs = inputs[: max(1, _CURVATURE_TOKENS // inputs.shape[1])]
    drawn = hashlib.blake2b(f"labels {config.seed} {step} {ranks.rank}".encode(), digest_size=7).digest()
    generator = torch.Generator(inputs.device).manual_seed(int.from_bytes(drawn, "little"))
    sampled_label_loss(module(inputs).logits, generator).backward()
    optimizer.update_hessian(num_labels=inputs.numel() * ranks.size)
    optimizer.zero_grad()
