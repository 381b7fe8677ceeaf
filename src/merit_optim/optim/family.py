"""The family: direction x ratio x hold x engine. Options, checks, and recordings of steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from merit_optim.optim import eligibility
from merit_optim.optim import options as step_options
from merit_optim.optim.axes.holds import Hold
from merit_optim.optim.axes.registered import AXES, all_options, choice_class, chosen, option_names, owners_of
from merit_optim.optim.base import SafeOptimizer
from merit_optim.optim.composition import ADAMW, Composition, Options
from merit_optim.optim.dispatch import Dispatch, fuses
from merit_optim.optim.engines import direct, fused_unavailable
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Work, count_step
from merit_optim.optim.options import ENGINE_DEFAULTS
from merit_optim.optim.refresh import Members
from merit_optim.optim.spec import Spec
from merit_optim.optim.statistics import Recorder, UpdateStatistics

if TYPE_CHECKING:
    from merit_optim.optim.engines.fused.engine import FusedEngine


class Family(SafeOptimizer):
    """A direction, a ratio and a hold; see ``algorithm.py`` for the equations.

    Parameter groups come from ``param_groups(model)``, which says the kind of their weights. Choices that are
    for some kinds alone leave the others to AdamW. Groups without a kind must then set their ``direction``.
    """

    COMPOSITION: ClassVar[Composition]

    _goes_by_kind = False
    """Whether a group was given choices because of its kind."""
    _has_own = False
    """Whether one of these was of a kind that the optimizer's own choices are for."""
    _recordings: tuple[Recorder, ...] = ()
    """The open recordings; they may end in any order."""
    _engines: dict[torch.device, FusedEngine] | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "COMPOSITION" in vars(cls):
            cls.ALGORITHM = cls.COMPOSITION.name
            cls.__signature__ = cls.COMPOSITION.signature  # type: ignore[attr-defined]

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        # Shapes given by the user, to recognize flat buffers that a sharding library substitutes for
        # parameters.
        self._shapes: set[torch.Size] = set()
        composition = self._composition = self.COMPOSITION.changed(options)
        self._check_arguments(options)
        given = {name: value for name, value in options.items() if name not in AXES}
        rates = {
            "lr": composition.lr if lr is None else lr,
            "weight_decay": composition.weight_decay if weight_decay is None else weight_decay,
        }
        super().__init__(params, {**rates, **ENGINE_DEFAULTS, **composition.options, **given})
        own = self.defaults["direction"]
        if self._goes_by_kind and not self._has_own:
            kinds = " or ".join(map(repr, composition.kinds or ()))
            raise ValueError(
                f"{type(self).__name__} was given no weight to use direction={own!r} for: none is of the "
                f"kind {kinds}. Set kinds with param_groups(model, kind_of={{'*.my_layer.*': 'hidden'}}); "
                "print(describe_groups(param_groups(model))) shows which there are. If this is a pipeline's "
                "stage without layers, set direction='adam' in its groups."
            )

    def _check_arguments(self, options: Mapping[str, Any]) -> None:
        """Raise TypeError for an argument that these choices do not have."""
        owner, known = type(self).__name__, {*self._composition.options, *ENGINE_DEFAULTS, *AXES}
        for name in options:
            if name not in known and name in ADAMW and self._composition.kinds is not None:
                raise TypeError(
                    f"{owner}.__init__() got an unexpected keyword argument {name!r}. It is an option of "
                    "Adam's direction, which embeddings, heads and vectors take. Set it for those that you "
                    f"mean: kinds={{'embedding': {{{name!r}: {options[name]!r}}}, ...}}"
                )
            if name not in known and (owners := owners_of(name)):
                raise TypeError(
                    f"{owner}.__init__() got an unexpected keyword argument {name!r}. It is an option of "
                    f"{owners}"
                )
        step_options.check_arguments(owner, options, {"lr", "weight_decay", *known})

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        step_options.check_engine(group)
        for axis in AXES:
            choice_class(axis, group[axis])
        if missing := [(axis, name) for axis, name in option_names(group) if name not in group]:
            axis = missing[0][0]
            names = ", ".join(name for of, name in missing if of == axis)
            raise ValueError(
                f"{axis}={group[axis]!r} needs {names}, which the group lacks; set them too, or add the "
                "parameters with add_param_group, which fills in the defaults"
            )
        for choice in Spec.of(group).choices:
            choice.check()
            if reason := choice.refused_options(group):
                raise ValueError(reason)

    def _spec_of(self, group: dict[str, Any]) -> Spec:
        return Spec.of(group)

    def _members(self) -> Members:
        groups = zip(self._known_specs(), self.param_groups, strict=True)
        return [(spec, group["params"]) for spec, group in groups]

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return Spec.of(group).keys

    def _state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        spec = Spec.of(group)
        shapes = spec.shapes(spec.view.matrices(param.shape))
        return {key: tuple(param.shape) if shape is None else shape for key, shape in shapes.items()}

    def _stacked_keys(self, group: dict[str, Any]) -> dict[str, bool]:
        return Spec.of(group).stacked_keys

    def _keys_that_can_begin(self, group: dict[str, Any]) -> tuple[str, ...]:
        return tuple(key for choice in Spec.of(group).choices for key in choice.keys_that_can_begin)

    def _needs_step(self, group: dict[str, Any]) -> bool:
        return Spec.of(group).direction.USES_STEP

    def _check_engine(self, group: dict[str, Any]) -> None:
        if group["fused"] and (reason := fused_unavailable()):
            raise RuntimeError(
                f"fused=True is not available: {reason}. Use fused=None for the fastest available engine."
            )

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        super()._check_parameter(name, param, group)
        is_new_vector = not is_lazy(param) and param.ndim == 1 and param.shape not in self._shapes
        sorts = self._composition.kinds is not None
        owner, spec = type(self).__name__, Spec.of(group)
        eligibility.check(owner, name, param, spec, is_new_vector=is_new_vector, sorts=sorts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its options.

        A direction, a ratio or a hold other than the optimizer's has its own defaults for missing options.
        """
        try:
            super().add_param_group(param_group)
        except Exception:
            self._shapes = self._shapes_of_all()
            raise

    def _known_options(self) -> Collection[str]:
        return {*super()._known_options(), *all_options()}

    def _implied(self, group: dict[str, Any]) -> dict[str, Any]:
        implied: dict[str, Any] = {}
        if self._is_for_adamw(group):
            implied = self._composition.adamw_options
        elif group.get("kind") == "experts":
            implied = {"matrix_dims": 2}
        for axis in AXES:
            usual = implied.get(axis, self.defaults[axis])
            if group.get(axis, usual) != usual:
                implied |= choice_class(axis, group[axis])().options
        full = {**self.defaults, **implied, **group}
        if "algorithm" not in group:  # else it was an optimizer's, which filled in what its choices have
            self._check_written(group, full)
        hold: Hold = chosen(full, "hold")
        return implied | hold.filled({**self.defaults, **group})

    def _check_written(self, written: Collection[str], group: dict[str, Any]) -> None:
        """Raise for an option that a user gave to a new group whose choices do not have it."""
        known = {name for _, name in option_names(group)} | ENGINE_DEFAULTS.keys()
        for name in written:
            if name not in known and (owners := owners_of(name)):
                choices = ", ".join(f"{axis}={group[axis]!r}" for axis in AXES)
                of_kind = f" of the kind {group['kind']!r}" if "kind" in group else ""
                raise ValueError(
                    f"a parameter group{of_kind} sets {name!r}, which its choices do not have: {choices}. It "
                    f"is an option of {owners}. Leave it out, or set it for the groups that have one of these"
                )

    def _is_for_adamw(self, group: dict[str, Any]) -> bool:
        """Whether AdamW updates the weights of a new group, because of its kind or its direction."""
        kinds, own = self._composition.kinds, self.defaults["direction"]
        if kinds is None:
            return False
        if "direction" in group:
            self._has_own |= group["direction"] == own
            return bool(group["direction"] == ADAMW["direction"] != own)
        if "kind" not in group:
            raise ValueError(
                f"{type(self).__name__} updates hidden matrices in one way and embeddings, heads and vectors "
                "in another, and parameters alone do not tell which is which. Use "
                f"{type(self).__name__}(param_groups(model), lr=...), or set direction={own!r} or 'adam' in "
                "every group."
            )
        self._goes_by_kind = True
        self._has_own |= group["kind"] in kinds
        return bool(group["kind"] not in kinds)

    def _check_new(self, index: int) -> None:
        group = self.param_groups[index]
        if not Spec.of(group).hold.USES_DECAY:
            group["weight_decay"] = 0.0
        self._shapes.update(param.shape for param in group["params"] if not is_lazy(param))
        super()._check_new(index)
        if group["fused"]:
            for name, param in self._named(index):
                eligibility.check_fused(name, param, Spec.of(group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_shapes"):  # copied or unpickled: __init__ did not run
            self._shapes = self._shapes_of_all()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_composition": self._composition}

    def _shapes_of_all(self) -> set[torch.Size]:
        params = (param for group in self.param_groups for param in group["params"])
        return {param.shape for param in params if not is_lazy(param)}

    def _step_device(self, param: Tensor, group: dict[str, Any]) -> torch.device:
        if Spec.of(group).direction.READS_STEP:
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
        on_host = any(spec.direction.READS_STEP for spec in self._known_specs())
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
