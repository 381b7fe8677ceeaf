"""torchtitan: MERIT, LAMB and MaxLAMB by name in its configurations, or by one flag on its command line."""

# torchtitan carries no types of its own.
# mypy: disable-error-code="import-not-found,import-untyped"
# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import derive, override

from merit_optim.optim import LAMB, MERIT, MaxLAMB
from merit_optim.optim.options import LATER
from merit_optim.optim.saved_state import with_dtype
from merit_optim.optim.trust import TrustRatioOptimizer

# Those that have the engines torchtitan's "implementation" chooses among.
OPTIMIZERS: dict[str, type[TrustRatioOptimizer]] = {cls.__name__: cls for cls in (MERIT, LAMB, MaxLAMB)}


class MeritOptimizersContainer(OptimizersContainer):
    """torchtitan's container, which knows the optimizers of this package as well as its own.

        optimizer=MeritOptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=r"norm",
                    optimizer_name="MERIT",
                    optimizer_kwargs={"lr": 9e-3, "weight_decay": 0.0},
                ),
                ParamGroupConfig(
                    pattern=r".*",
                    optimizer_name="MERIT",
                    optimizer_kwargs={"lr": 9e-3, "weight_decay": 0.1},
                ),
            ]
        )

    ``implementation`` chooses the engine: "fused" and "foreach" are those of ``MERIT(fused=True)`` and
    ``MERIT(foreach=True)``, "for-loop" is neither.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's, with more names allowed."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        ours = sorted({group.optimizer_name for group in config.param_groups} & set(OPTIMIZERS))
        if ours and config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                f"implementation 'fused_opt_states_bf16' is for Adam and AdamW, not {', '.join(ours)}; use "
                '\'fused\', with "state_dtype": "bfloat16" in optimizer_kwargs'
            )
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Optimizer]:
        if name in OPTIMIZERS:
            return partial(_build, OPTIMIZERS[name])
        try:
            factory: Callable[..., Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
        except NotImplementedError:
            raise NotImplementedError(
                f"no optimizer is named {name!r}; known are {', '.join(OPTIMIZERS)}, and those of torchtitan"
            ) from None
        return factory


def _build(
    kind: type[TrustRatioOptimizer], groups: list[dict[str, Any]], **options: Any
) -> TrustRatioOptimizer:
    try:
        # Dtypes by name: torchtitan reads and writes options as JSON.
        optimizer = kind([with_dtype(group) for group in groups], **with_dtype(options))
    except (RuntimeError, ValueError) as error:
        if str(error).startswith("fused=True"):
            error.add_note("In torchtitan: implementation='foreach', or \"fused\": None in optimizer_kwargs.")
        raise
    for group in optimizer.param_groups:
        _check_options(kind.__name__, group, {**LATER, **optimizer.defaults})
    return optimizer


def _check_options(name: str, group: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise on what torch lets pass in a parameter group, and torchtitan with it."""
    for option in sorted(group.keys() - known.keys() - {"params", "param_names"}):
        nearest = difflib.get_close_matches(option, known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        allowed = ", ".join(key for key in known if key != "algorithm")
        raise ValueError(f"{name} has no option {option!r}{hint} Known are {allowed}.")
    if group["max_grad_norm"] is not None:
        raise ValueError(
            f"max_grad_norm is {group['max_grad_norm']!r}, but torchtitan clips gradients before the step, "
            "by the norm over all stages of a pipeline; set training.max_norm and leave max_grad_norm at None"
        )


def default_merit(lr: float = 9e-3, **options: Any) -> MeritOptimizersContainer.Config:
    """MERIT for every parameter, as torchtitan's ``default_adamw`` is AdamW for every parameter."""
    return MeritOptimizersContainer.Config(param_groups=[_for_all("MERIT", lr=lr, **options)])


def _for_all(name: str, **options: Any) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=r".*", optimizer_name=name, optimizer_kwargs=options)


# Each is a whole optimizer on the command line; torchtitan finds an override by its function's name:
#     --override.imports 'merit_optim.integrations.torchtitan.merit={"lr": 0.009}'


@override(target=OptimizersContainer.Config, description="MERIT for every parameter")
def merit(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """MERIT in place of a configuration's optimizer, with its own defaults but for ``options``."""
    return _replaced(config, "MERIT", options)


@override(target=OptimizersContainer.Config, description="LAMB for every parameter")
def lamb(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """LAMB in place of a configuration's optimizer, with its own defaults but for ``options``."""
    return _replaced(config, "LAMB", options)


@override(target=OptimizersContainer.Config, description="MaxLAMB for every parameter")
def max_lamb(config: OptimizersContainer.Config, **options: Any) -> MeritOptimizersContainer.Config:
    """MaxLAMB in place of a configuration's optimizer, with its own defaults but for ``options``."""
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
            f"the configuration has parameter groups of its own ({patterns}), which an override for {name} "
            "would drop; write a configuration with MeritOptimizersContainer"
        )
    replaced: MeritOptimizersContainer.Config = derive(
        config, MeritOptimizersContainer.Config, param_groups=[_for_all(name, **options)]
    )
    return replaced
