"""torchtitan: use this package's optimizers by name in configurations, or by a flag on the command line."""

# torchtitan has no type annotations.
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive, override
from torchtitan.tools.logging import logger

from merit_optim.optim import describe_groups, kind_options
from merit_optim.optim.composition import ADAMW
from merit_optim.optim.family import Family
from merit_optim.optim.groups import divided, options_of_kind
from merit_optim.optim.kinds import kinds_of, transposed_in
from merit_optim.optim.options import ENGINE_DEFAULTS
from merit_optim.optim.registry import FAMILY, unknown
from merit_optim.optim.saved_state import with_dtype
from merit_optim.spelling import did_you_mean

_OF_WEIGHTS = ("params", "param_names", "kind", "transposed", "matrix_dims")
# Optimizers with one direction for hidden matrices and another for the rest.
_SORTING = {name: cls for name, cls in FAMILY.items() if cls.COMPOSITION.kinds is not None}


class MeritOptimizersContainer(OptimizersContainer):
    """torchtitan's container, extended by the optimizers of this package.

        optimizer=MeritOptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r"norm",
                    optimizer_name="MuonMERIT",
                    optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0},
                ),
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name="MuonMERIT",
                    optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1},
                ),
            ]
        )

    For Muon's and SOAP's directions, and if ``optimizer_kwargs`` has ``kinds``, weights are sorted by their
    kind in their model part, and ``optimizer_kwargs`` are arguments of the class. A group that sets
    ``direction`` is not sorted: its options apply to all its weights.

    ``implementation`` chooses the engine: "fused" and "foreach" are those of ``MERIT(fused=True)`` and
    ``MERIT(foreach=True)``, "for-loop" is neither. If weights are sorted, not all can be fused, and "fused"
    is the fastest engine available for each.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's configuration, with more optimizer names."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        ours = sorted({group.optimizer_name for group in config.param_groups} & set(FAMILY))
        if ours and config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                f"implementation 'fused_opt_states_bf16' is for Adam and AdamW, not {', '.join(ours)}; use "
                '\'fused\', with "state_dtype": "bfloat16" in optimizer_kwargs'
            )
        super().__init__(config, model_parts=model_parts)
        sorted_names = {group.optimizer_name for group in config.param_groups if _is_sorted(group)}
        for name in sorted(sorted_names & _SORTING.keys()):
            self._check_some_hidden(_SORTING[name])

    def _check_some_hidden(self, kind: type[Family]) -> None:
        """Raise ValueError if an optimizer has no hidden matrix, although the model parts have some."""
        optimizers = [optimizer for optimizer in self.optimizers if type(optimizer) is kind]
        direction = optimizers[0].defaults["direction"]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if any(group["direction"] == direction for group in groups):
            return
        kinds = {param: its_kind for part in self.model_parts for param, its_kind in kinds_of(part).items()}
        hidden = [
            name
            for part in self.model_parts
            for name, param in part.named_parameters()
            if param.requires_grad and kinds[param] in (kind.COMPOSITION.kinds or ())
        ]
        if hidden:
            raise ValueError(
                f"{kind.__name__} has no weight to use direction={direction!r} for: {hidden[0]} and others "
                "like it match the patterns of other optimizers. The first pattern that matches counts: put "
                f"{kind.__name__}'s before those, or use another optimizer for all groups."
            )
        logger.warning(
            f"{kind.__name__} has no weight to use direction={direction!r} for on this rank, and is AdamW "
            "here. This is expected only in a pipeline stage without layers."
        )

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name in FAMILY:
            return partial(_build, FAMILY[name])
        try:
            factory: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError:
            error = unknown("optimizer", name, FAMILY)
            error.add_note("torchtitan's own names are allowed too.")
            raise error from None
        return factory

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        groups, patterns = OptimizersContainer._build_param_groups(model, param_group_configs, impl_kwargs)
        for name in groups.keys() & FAMILY.keys():
            is_mixed = name in _SORTING and impl_kwargs["fused"]
            engine = {"fused": None, "foreach": None} if is_mixed else impl_kwargs
            transposed = transposed_in(model)
            found: dict[Tensor, dict[str, Any]] = {
                param: options_of_kind(kind, param, is_transposed=param in transposed)
                for param, kind in kinds_of(model).items()
            }
            configs = [config for config in param_group_configs if config.optimizer_name == name]
            whole, groups[name] = groups[name], []
            for config, group in zip(configs, whole, strict=True):
                group |= {**engine, **config.optimizer_kwargs}
                groups[name] += divided(group, found) if _is_sorted(config) else [group]
        return groups, patterns

    def _log_optimizer(self, optimizer: Optimizer, part_idx: int, patterns: list[str]) -> None:
        if type(optimizer) not in _SORTING.values():
            super()._log_optimizer(optimizer, part_idx, patterns)
            return
        # There are more groups than patterns.
        logger.info(
            f"Optimizer {type(optimizer).__name__} (model_part={part_idx}): {patterns}\n"
            f"{describe_groups(optimizer)}"
        )


def _is_sorted(config: ParamGroupConfig) -> bool:
    """Whether the weights of a group are sorted by kind."""
    options = config.optimizer_kwargs
    return (config.optimizer_name in _SORTING or "kinds" in options) and "direction" not in options


def _build(kind: type[Family], groups: list[dict[str, Any]], **options: Any) -> Family:
    try:
        # Dtypes by name: torchtitan reads and writes options as JSON.
        optimizer, *others = [_of_group(kind, with_dtype(group), with_dtype(options)) for group in groups]
    except (RuntimeError, ValueError) as error:
        if str(error).startswith("fused=True"):
            error.add_note("In torchtitan: implementation='foreach', or \"fused\": None in optimizer_kwargs.")
        raise
    for other in others:
        for group in other.param_groups:
            optimizer.add_param_group(group)
    for group in optimizer.param_groups:
        _check_names(kind.__name__, group, {**ADAMW, **optimizer.defaults})
        if group["max_grad_norm"] is not None:
            raise ValueError(
                f"max_grad_norm is {group['max_grad_norm']!r}, but torchtitan clips gradients before the "
                "step, by the norm over all stages of a pipeline; set training.max_norm and leave "
                "max_grad_norm at None"
            )
    return optimizer


def _of_group(kind: type[Family], group: dict[str, Any], options: dict[str, Any]) -> Family:
    """Return an optimizer for one group. With sorted weights, its options are arguments of the class."""
    if "kind" not in group:
        return kind([group], **options)
    weights = {key: group[key] for key in _OF_WEIGHTS if key in group}
    arguments = {key: value for key, value in group.items() if key not in weights}
    known = [*inspect.signature(kind).parameters, *ENGINE_DEFAULTS]
    _check_names(kind.__name__, arguments, known)
    kinds = arguments.pop("kinds", None) or {}
    kind_options.check(kind.__name__, kinds, {*known, *ADAMW, "rate_scale"})
    weights = kind_options.completed(weights, kinds)
    directed = kind.COMPOSITION.kinds
    if directed is not None and weights["kind"] not in directed:
        # The class would refuse this, but the layers may be in another group, part or stage.
        weights = {"direction": ADAMW["direction"], **weights}
    return kind([weights], **{**options, **arguments})


def _check_names(name: str, group: dict[str, Any], known: Collection[str]) -> None:
    """Raise ValueError on unknown options, which torch and torchtitan accept in a parameter group."""
    no_options = ("params", "param_names", "kind", "algorithm", "options")
    for option in sorted(group.keys() - {*known, *no_options}):
        hint = did_you_mean(option, known)
        allowed = ", ".join(option for option in known if option not in no_options)
        raise ValueError(f"{name} has no option {option!r}{hint} Its options are {allowed}.")


def default_optimizer(name: str, **options: Any) -> MeritOptimizersContainer.Config:
    """Return one optimizer for every parameter, like torchtitan's ``default_adamw`` for AdamW.

        config.optimizer = default_optimizer("MuonMERIT", lr=1e-2)

    Args:
        name: as in ``optimizer_class``, or one of torchtitan's.
        options: arguments of the optimizer.
    """
    group = ParamGroupConfig(pattern=r".*", optimizer_name=name, optimizer_kwargs=options)
    return MeritOptimizersContainer.Config(param_groups=[group])


def default_merit(lr: float = 9e-3, **options: Any) -> MeritOptimizersContainer.Config:
    """MERIT for every parameter."""
    return default_optimizer("MERIT", lr=lr, **options)


# Overrides for the command line; torchtitan finds an override by its function's name:
#     --override.imports 'merit_optim.integrations.torchtitan.by_name={"name": "MuonMERIT", "lr": 1e-2}'


@override(target=OptimizersContainer.Config, description="one optimizer for every parameter, by its name")
def by_name(
    config: OptimizersContainer.Config, *, name: str, **options: Any
) -> MeritOptimizersContainer.Config:
    """Replace a configuration's optimizer by the one named; options not given have its defaults."""
    return _replaced(config, name, options)


@override(target=OptimizersContainer.Config, description="MERIT for every parameter")
def merit(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """Replace a configuration's optimizer by MERIT; options not given have its defaults."""
    return _replaced(config, "MERIT", options)


@override(target=OptimizersContainer.Config, description="LAMB for every parameter")
def lamb(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """Replace a configuration's optimizer by LAMB; options not given have its defaults."""
    return _replaced(config, "LAMB", options)


@override(target=OptimizersContainer.Config, description="MaxLAMB for every parameter")
def max_lamb(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """Replace a configuration's optimizer by MaxLAMB; options not given have its defaults."""
    return _replaced(config, "MaxLAMB", options)


def _replaced(
    config: OptimizersContainer.Config, name: str, options: dict[str, Any]
) -> MeritOptimizersContainer.Config:
    if type(config) not in (OptimizersContainer.Config, MeritOptimizersContainer.Config):
        raise ValueError(
            f"the optimizer is configured by {type(config).__qualname__}, which an override for {name} "
            "cannot replace; write a configuration with MeritOptimizersContainer"
        )
    if len(config.param_groups) > 1:
        patterns = ", ".join(repr(group.pattern) for group in config.param_groups)
        raise ValueError(
            f"the configuration has several parameter groups ({patterns}), which an override for {name} "
            "would drop; write a configuration with MeritOptimizersContainer"
        )
    replaced: MeritOptimizersContainer.Config = derive(
        config, MeritOptimizersContainer.Config, param_groups=default_optimizer(name, **options).param_groups
    )
    return replaced
