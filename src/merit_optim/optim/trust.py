"""The base class of the family (direction x ratio x engine): options, checks, and recordings of steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from merit_optim.optim import options as step_options
from merit_optim.optim import validate
from merit_optim.optim.algorithm import NORMS, Rule
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.directions import (
    DIRECTIONS,
    Adam,
    Direction,
    MatrixDirection,
    direction_of,
    option_names,
)
from merit_optim.optim.dispatch import Dispatch, fuses
from merit_optim.optim.engines import direct, fused_unavailable, interpreting
from merit_optim.optim.engines.ranks import placements
from merit_optim.optim.engines.ranks.placements import is_sharded, refuse_inexact
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Work, count_step
from merit_optim.optim.groups import by_orientation
from merit_optim.optim.matrices import Matrices, View
from merit_optim.optim.options import ENGINE_DEFAULTS, EngineOptions
from merit_optim.optim.refresh import Members
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder, UpdateStatistics
from merit_optim.optim.torch_private import is_flat_of_fsdp1

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from merit_optim.optim.engines.fused.engine import FusedEngine

_ANY_MATRICES = Matrices(1, 1, 1, is_vector=False)


class TrustRatioOptimizer(SafeOptimizer):
    """A direction, trust ratios and a clip; see ``algorithm.py`` for the equations."""

    _recordings: tuple[Recorder, ...] = ()
    """The open recordings; they may end in any order."""
    _engines: dict[torch.device, FusedEngine] | None = None

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | Tensor,
        weight_decay: float,
        direction: Direction,
        rule: Rule,
        **options: Unpack[EngineOptions],
    ) -> None:
        # Shapes given by the user, to recognize flat buffers that a sharding library substitutes for
        # parameters.
        self._shapes: set[torch.Size] = set()
        super().__init__(
            params,
            step_options.without_later(
                {
                    "lr": lr,
                    "weight_decay": weight_decay,
                    **direction.options,
                    **rule._asdict(),
                    **step_options.filled(type(self), options, ENGINE_DEFAULTS),
                }
            ),
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        group = {**step_options.LATER, **group}
        super()._check_group(group)
        step_options.check_engine(group)
        validate.one_of("direction", group["direction"], tuple(DIRECTIONS))
        if missing := [name for name in option_names(group) if name not in group]:
            raise ValueError(
                f"direction={group['direction']!r} needs {', '.join(missing)}, which the group lacks; "
                "set them too, or add the parameters with add_param_group, which fills in the defaults"
            )
        direction = direction_of(group)
        direction.check()
        validate.one_of("norm", group["norm"], NORMS)
        validate.bounds("ratio_bounds", group["ratio_bounds"])
        if group["clip"] is not None:
            validate.positive("clip", group["clip"], "None for no clip")
        for option in ("element_wise", "weight_bound", "calibrated"):
            validate.flag(option, group[option])
        if group["calibrated"] and (group["element_wise"] or group["norm"] == "none"):
            options = f"element_wise={group['element_wise']} and norm={group['norm']!r}"
            raise ValueError(
                f"calibrated=True needs one ratio for the whole weight, but the options are {options}; use "
                "element_wise=False and norm='l2' or 'max'"
            )
        if reason := direction.refused_options(group):
            raise ValueError(reason)

    def _spec_of(self, group: dict[str, Any]) -> Spec:
        return Spec.of(group)

    def _members(self) -> Members:
        groups = zip(self._known_specs(), self.param_groups, strict=True)
        return [(spec, group["params"]) for spec, group in groups]

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return Spec.of(group).keys

    def _state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        matrices, rule = View.of(group).matrices(param.shape), Rule.of(group)
        shapes = direction_of(group).shapes(matrices) + tuple((matrices.num, 1, 1) for _ in rule.keys)
        return {
            key: tuple(param.shape) if shape is None else shape
            for key, shape in zip(self._state_keys(group), shapes, strict=True)
        }

    def _stacked_keys(self, group: dict[str, Any]) -> dict[str, bool]:
        direction = direction_of(group)
        shapes = zip(direction.keys, direction.shapes(_ANY_MATRICES), strict=True)
        stacked = {key: key in direction.keys_by_rows for key, shape in shapes if shape is not None}
        return stacked | dict.fromkeys(Rule.of(group).keys, False)

    def _keys_that_can_begin(self, group: dict[str, Any]) -> tuple[str, ...]:
        return direction_of(group).keys_that_can_begin

    def _needs_step(self, group: dict[str, Any]) -> bool:
        return direction_of(group).USES_STEP

    def _check_engine(self, group: dict[str, Any]) -> None:
        if group["fused"] and (reason := fused_unavailable()):
            raise RuntimeError(
                f"fused=True is not available: {reason}. Use fused=None for the fastest available engine."
            )

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._check_parameter(name, param, group)
        if is_lazy(param):
            raise TypeError(
                f"{name} has no shape yet; its rows and columns are known after one forward pass of the "
                "model. Create the optimizer after that."
            )
        if param.ndim == 1 and param.shape not in self._shapes:
            raise TypeError(
                f"a parameter was replaced by a flat buffer of {param.numel()} elements, a shape that "
                f"{type(self).__name__} was not given. DeepSpeed ZeRO and Megatron's distributed optimizer "
                "do this: without rows and columns there are no trust ratios. Use FSDP2 or DDP, or, if "
                "the parameter is yours, add_param_group."
            )
        if is_flat_of_fsdp1(param):
            raise TypeError(
                f"{name} is a flat parameter of FSDP1: without rows and columns there are no trust ratios. "
                "Use FSDP2 (torch.distributed.fsdp.fully_shard), or an optimizer outside this family."
            )
        refuse_inexact(name, param)
        view, group = View.of(group), {**step_options.LATER, **group}
        reason = view.refusal(param.shape) or direction_of(group).refusal(view, param.shape)
        if group["calibrated"] and view.split is not None:
            reason = "calibrated=True keeps one ratio per weight: use split=None"
        if reason:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} cannot be optimized with these options: {reason}"
            )
        if is_sharded(param):
            self._check_sharded(name, param, group)

    def _check_sharded(self, name: str, param: DTensor, group: dict[str, Any]) -> None:
        """Raise if a sharded parameter cannot be optimized with the options of its group."""
        view = View.of(group)
        if isinstance(direction_of(group), MatrixDirection) or view.split is not None:
            placements.local_region(name, param)
        has_stacked = bool(self._stacked_keys(group))
        if reason := placements.refusal(param, view, has_stacked_state=has_stacked):
            raise ValueError(f"{name} of shape {tuple(param.shape)} cannot be sharded like this: {reason}")
        if self.defaults["differentiable"]:
            raise TypeError(
                f"{name} is sharded, and a differentiable step does not communicate with other ranks. Use "
                "differentiable=False, or unsharded parameters."
            )

    def _check_fused(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise if the fused engine, which was required, cannot update a parameter."""
        from merit_optim.optim.engines.fused.refusals import refusal

        reason = refusal(Spec.of(group), param)
        if param.device.type != "cuda" and not interpreting():
            reason = f"it is on {param.device}, and the fused engine runs on CUDA devices"
        if reason:
            raise ValueError(
                f"fused=True, but {name} of shape {tuple(param.shape)} cannot be fused: {reason}. Move or "
                "change it, or use fused=None for the fastest engine that each parameter allows."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, in several groups if they need different options.

        A direction other than the optimizer's has its own defaults for missing options.
        """
        num_before, default = len(self.param_groups), self.defaults.get("direction", Adam.NAME)
        try:
            for group in self._sorted(param_group):
                name = group.get("direction", default)
                if name != default and name in DIRECTIONS:
                    group = {**DIRECTIONS[name]().options, **group}
                super().add_param_group(group)
        except Exception:
            del self.param_groups[num_before:]
            self._shapes = self._shapes_of_all()
            raise

    def _sorted(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The groups to add: two if weights are stored in both orientations and the update depends on it."""
        options = {**self.defaults, **group}
        name = options.get("direction", Adam.NAME)
        uses_orientation = name in DIRECTIONS and DIRECTIONS[name].USES_ORIENTATION
        depends = uses_orientation or options.get("split") is not None
        return by_orientation(group) if depends else [group]

    def _check_new(self, index: int) -> None:
        group = self.param_groups[index]
        self._shapes.update(param.shape for param in group["params"] if not is_lazy(param))
        super()._check_new(index)
        if group["fused"]:
            for name, param in self._named(index):
                self._check_fused(name, param, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_shapes"):  # copied or unpickled: __init__ did not run
            self._shapes = self._shapes_of_all()

    def _shapes_of_all(self) -> set[torch.Size]:
        params = (param for group in self.param_groups for param in group["params"])
        return {param.shape for param in params if not is_lazy(param)}

    def _step_device(self, param: Tensor, group: dict[str, Any]) -> torch.device:
        if direction_of(group).READS_STEP:
            return torch.device("cpu")
        # Many small additions on the host would cost more than the fused step.
        return param.device if fuses(Spec.of(group), param) else super()._step_device(param, group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        fused = all(
            fuses(Spec.of(group), param) for group in self.param_groups for param in group["params"][:1]
        )
        return fused or super()._step_supports_amp_scaling

    def _leaves_the_graph(self) -> bool:
        on_host = any(direction_of(group).READS_STEP for group in self.param_groups)
        return on_host or bool(self._recordings) or super()._leaves_the_graph()

    def _take_step(self) -> None:
        for recording in self._recordings:
            recording.clear()  # even if the step will be skipped
        super()._take_step()

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        if torch.compiler.is_compiling() or self.defaults["differentiable"]:
            count_step(works, controls)
            direct.step(works, controls)
            return
        recorder = Recorder() if self._recordings else None
        dispatch = Dispatch(self._members(), self.state, self._fused_engine)
        dispatch.take_step(works, controls, sharding, recorder)
        if recorder is not None:
            self._record(recorder)

    def _record(self, recorder: Recorder) -> None:
        """Copy the statistics of a step into all open recordings, in the order of the parameters."""
        names = [name for index in range(len(self.param_groups)) for name, _ in self._named(index)]
        for recording in self._recordings:
            recording.update({name: recorder[name] for name in names if name in recorder})

    def _fused_engine(self, device: torch.device) -> FusedEngine:
        from merit_optim.optim.engines.fused.engine import FusedEngine

        if self._engines is None:
            self._engines = {}
        if device not in self._engines:
            self._engines[device] = FusedEngine(device)
        return self._engines[device]

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, UpdateStatistics]]:
        """Measure the update of every parameter in the steps taken inside.

        Each step replaces the statistics of the previous one. Steps outside have no extra cost. The names
        are those given with the parameters (``model.named_parameters()``, or ``param_groups``), in the order
        of the optimizer's groups. Several recordings may be open at a time, and may end in any order.

        Examples:
            >>> import torch
            >>> from merit_optim import MERIT
            >>> linear = torch.nn.Linear(4, 4)
            >>> optimizer = MERIT(linear.named_parameters())
            >>> linear(torch.ones(2, 4)).sum().backward()
            >>> with optimizer.recording() as statistics:
            ...     optimizer.step()
            >>> 0 <= statistics["weight"].clipped <= 1
            True
        """
        if self.defaults["differentiable"]:
            raise RuntimeError("a differentiable step cannot be recorded; use differentiable=False")
        named = Counter(name for index in range(len(self.param_groups)) for name, _ in self._named(index))
        for name, count in named.items():
            if count > 1:
                raise ValueError(
                    f"{count} parameters are named {name!r}, and statistics are stored by name; give the "
                    "optimizer unique names, as param_groups(model) does"
                )
        recording = Recorder()
        self._recordings = (*self._recordings, recording)
        try:
            yield recording
        finally:
            self._recordings = tuple(other for other in self._recordings if other is not recording)
