"""The base class of all optimizers of this package: the order of a step, its checks, and its state.

A step collects the parameters that have gradients, decides how to scale the gradients or whether to skip the
step (``control.py``), and calls the subclass's ``_update``. Invalid options and parameters raise before
anything is changed (``options.py``, ``states.py``), and saved state is restored exactly (``saved_state.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from merit_optim.optim import kind_options, options, saved_state, states, validate
from merit_optim.optim.control import Log, controls_of, only_makes_state
from merit_optim.optim.engines.ranks.placements import any_sharded, local
from merit_optim.optim.engines.ranks.sharding import Sharding
from merit_optim.optim.engines.work import Controls, Names, Work
from merit_optim.optim.names import plain
from merit_optim.optim.refresh import Members
from merit_optim.optim.spec import ELEMENT_WISE
from merit_optim.optim.torch_private import (
    check_graph_capture,
    never_compiled,
    with_grad_if_differentiable,
)

_GRAD, _LAYOUT, _SHAPE = map(operator.attrgetter, ("grad", "layout", "shape"))
_AUTOCASTING = ("cpu", "cuda", "mps", "xpu")


class SafeOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that checks its input and restores saved state exactly.

    Subclasses define ``ALGORITHM`` and their state tensors, and implement ``_update``.
    """

    ALGORITHM: ClassVar[str]
    """Stored in every parameter group, so that a checkpoint identifies the optimizer of its options."""
    STATE_KEYS: ClassVar[tuple[str, ...]]
    """The state tensors of a parameter, each of its shape, if they are the same in all groups."""

    _sharding: Sharding | None = None
    _watch: options.Watch | None = None
    _specs: list[Any] | None = None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        # A dict, because torch.compile loses assignments to an optimizer's attributes in a step.
        self._log: Log = {}
        self._kinds: kind_options.KindOptions = defaults.pop("kinds") or {}
        self.defaults = defaults | {"rate_scale": 1.0, "algorithm": self.ALGORITHM}
        self._check_group(self.defaults)
        self._check_engine(self.defaults)
        kind_options.check(type(self).__name__, self._kinds, self._known_options())
        validate.parameters(params)
        super().__init__(params, self.defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of a parameter group is not allowed."""
        options.check_step(group)

    def _check_engine(self, group: dict[str, Any]) -> None:
        """Raise if a new group requires an engine that is not available. Loaded groups are not checked."""

    def _check_parameter(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise if a parameter cannot be optimized with the options of its group."""
        if not param.is_floating_point():
            way_out = (
                "Keep a real parameter with a last dimension of 2 instead, and use torch.view_as_complex in "
                "the model."
                if param.is_complex()
                else "Leave it out, or convert it."
            )
            raise TypeError(
                f"{name} has dtype {param.dtype}; {type(self).__name__} takes real floating-point "
                f"parameters. {way_out}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its options."""
        if isinstance(param_group, dict):
            param_group = kind_options.completed(param_group, self._kinds)
            param_group = {**self._implied(param_group), **param_group}
            # Of a group that was another optimizer's: the checkpoints of this one would be taken for its.
            param_group.pop("algorithm", None)
            options.check_names(type(self).__name__, param_group, self._known_options())
            group = {**self.defaults, **param_group}
            self._check_group(group)
            self._check_engine(group)
            self._check_differentiable(param_group)
            options.check_alike(group, self.param_groups)
        super().add_param_group(param_group)
        if "param_names" in (group := self.param_groups[-1]):
            group["param_names"] = list(map(plain, group["param_names"]))
        try:
            self._check_new(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _implied(self, group: dict[str, Any]) -> dict[str, Any]:
        """Defaults for a new group that are not the optimizer's, because of the options that it has."""
        return {}

    def _check_new(self, index: int) -> None:
        """Raise if a parameter of a new group cannot be optimized."""
        self._check_parameters(index)

    def _check_parameters(self, index: int) -> None:
        """Raise if the options of a group do not fit its parameters, or their state."""
        for name, param in self._named(index):
            self._check_parameter(name, param, self.param_groups[index])
            if self.state.get(param):
                states.check_fits(self, index, name, param)

    def _known_options(self) -> Collection[str]:
        """The options that a group may have."""
        return {*self.defaults, "kind"}

    def _check_differentiable(self, param_group: dict[str, Any]) -> None:
        """Raise if a group differs from the optimizer, whose value decides if autograd records a step."""
        whole = self.defaults["differentiable"]
        value = param_group.get("differentiable", whole)
        if value != whole:
            raise ValueError(
                f"a parameter group has differentiable={value!r}, the optimizer {whole!r}; it must be equal "
                "for the whole step. Pass it to the optimizer, not to a group."
            )

    def _named(self, group_index: int) -> Iterator[tuple[str, Tensor]]:
        group = self.param_groups[group_index]
        names = Names.of(group_index, group)
        for place, param in enumerate(group["params"]):
            yield names.at(place), param

    # --- the step -----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells ``GradScaler`` to leave unscaling and skipping to the step, which needs no host sync."""
        return bool(self.defaults["capturable"])

    @with_grad_if_differentiable
    def step(  # type: ignore[override]  # the base class declares overloads, which a decorator hides
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step.

        Args:
            closure: recomputes the loss and its gradients, and returns the loss.
        """
        check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with _without_autocast():
            if torch.compiler.is_compiling() and self._leaves_the_graph():
                self._take_step_uncompiled()
            else:
                self._take_step()
        return loss

    def _take_step(self) -> None:
        is_first = not self.state
        works = self._gather()
        sharding = self._find_sharding()
        if sharding is not None:
            works = [local(work) for work in works]
        elif not works:
            if "grad_norm" in self._log:
                self._log["grad_norm"] = torch.zeros_like(self._log["grad_norm"])
            return
        if only_makes_state(works, sharding, self.param_groups, is_first=is_first):
            return
        controls = self._controls(works, sharding)
        if controls is not None:
            self._update(works, controls, sharding)

    @never_compiled
    def _take_step_uncompiled(self) -> None:
        self._take_step()

    def _leaves_the_graph(self) -> bool:
        """Whether the step cannot be compiled: if sharded, each rank would treat its shard as the whole."""
        return self._is_sharded()

    def _is_sharded(self) -> bool:
        return any(any_sharded(group["params"]) for group in self.param_groups)

    def _spec_of(self, group: dict[str, Any]) -> Any:
        """What a step does to a group, read from its options: a ``Spec`` in the family."""
        raise NotImplementedError

    def _members(self) -> Members:
        """The spec and the parameters of every group; outside the family updates are element-wise."""
        return [(ELEMENT_WISE, group["params"]) for group in self.param_groups]

    def _find_sharding(self) -> Sharding | None:
        """The exchange between ranks for sharded parameters; None without sharded parameters."""
        if not self._is_sharded():
            return None
        if self._sharding is None or not self._sharding.fits(self._members()):
            self._sharding = Sharding(self._members())
        return self._sharding

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        """Count the step, and update parameters and state."""
        raise NotImplementedError

    def _gather(self) -> list[Work]:
        """Collect the parameters that have gradients, with their state, by group."""
        if not torch.compiler.is_compiling():
            self._watch = self._watch or options.Watch()
            changed = self._watch.check(self.param_groups, self._check_group, self._check_parameters)
            if changed or self._specs is None:
                self._specs = list(map(self._spec_of, self.param_groups))
        works: list[Work] = []
        for index, (group, spec) in enumerate(zip(self.param_groups, self._known_specs(), strict=True)):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            steps: list[Tensor] = []
            states: list[list[Tensor]] = [[] for _ in self._state_keys(group)]
            self._init_group(group, params, grads, steps, *states)
            if params:
                names, rate, decay = Names.of(index, group), options.rate(group), group["weight_decay"]
                works.append(Work(names, spec, rate, decay, params, params, grads, steps, states))
        return works

    def _known_specs(self) -> list[Any]:
        """The spec of every group, as options were when they were last checked."""
        if self._specs is None or torch.compiler.is_compiling():
            return [self._spec_of(group) for group in self.param_groups]
        return self._specs

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        *states: list[Tensor],
    ) -> None:
        """Fill the lists with the tensors of the parameters that have gradients.

        torch.compile recognizes this method by name and runs it instead of tracing it, which is why it
        fills lists and returns nothing.
        """
        # With hundreds of parameters this is most of a step's host time: every loop does one thing, and
        # details of an error are searched for only after it was detected.
        params += group["params"]
        grads += map(_GRAD, params)
        if type(None) in set(map(type, grads)):
            params[:] = [param for param in params if param.grad is not None]
            grads[:] = map(_GRAD, params)
        if set(map(_LAYOUT, grads)) - {torch.strided}:
            param, grad = next(
                pair for pair in zip(params, grads, strict=True) if _LAYOUT(pair[1]) != torch.strided
            )
            raise TypeError(
                f"the gradient of {self._name_of(param)} (shape {tuple(param.shape)}) has layout "
                f"{grad.layout}; {type(self).__name__} needs dense gradients. For an embedding, "
                "use sparse=False."
            )
        of_params: list[Any] = list(map(self.state.get, params))
        if not all(of_params):
            of_params = [self._state_of(param, group) for param in params]
        steps += [state["step"] for state in of_params]
        for key, tensors in zip(self._state_keys(group), states, strict=True):
            tensors += [state[key] for state in of_params]
        # The first state of every direction has the parameter's shape.
        if list(map(_SHAPE, params)) != list(map(_SHAPE, states[0])):
            param, state = next(
                pair for pair in zip(params, states[0], strict=True) if _SHAPE(pair[0]) != _SHAPE(pair[1])
            )
            raise ValueError(
                f"{self._name_of(param)} has shape {tuple(param.shape)}, and its state {tuple(state.shape)}: "
                "the parameter's data was replaced by data of another shape. Create a new optimizer for it, "
                "or delete its state: del optimizer.state[param]."
            )

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, initialized if there is none."""
        if not self.state.get(param):
            self._check_parameter(f"{self._name_of(param)} of shape {tuple(param.shape)}", param, group)
            self.state[param] = states.made(self, param, group)
        return cast("dict[str, Any]", self.state[param])

    def _name_of(self, param: Tensor) -> str:
        named = (pair for index in range(len(self.param_groups)) for pair in self._named(index))
        return next(name for name, other in named if other is param)

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the state tensors of a group's parameters."""
        return self.STATE_KEYS

    def _state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The shape of each state tensor."""
        return dict.fromkeys(self._state_keys(group), tuple(param.shape))

    def _stacked_keys(self, group: dict[str, Any]) -> dict[str, bool]:
        """The state tensors with one item per stacked matrix, which do not have the parameter's shape.

        The value says whether ranks that share a matrix split its rows. Otherwise each holds all of it.
        """
        return {}

    def _keys_that_can_begin(self, group: dict[str, Any]) -> tuple[str, ...]:
        """State that begins at zero where the state of another optimizer, which is loaded, lacks it."""
        return ()

    def _needs_step(self, group: dict[str, Any]) -> bool:
        """Whether the update depends on the step count."""
        return True

    def _step_device(self, param: Tensor, group: dict[str, Any]) -> torch.device:
        """The device of the step count: the parameter's if it is decided there whether a step is skipped."""
        on_device = group["capturable"] or group["nonfinite"] == "skip"
        return param.device if on_device else torch.device("cpu")

    @staticmethod
    def _state_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else group["state_dtype"]

    # --- scaling and skipping -------------------------------------------------------------------------

    def _controls(
        self, works: list[Work], sharding: Sharding | None, *, clips_norm: bool = True
    ) -> Controls | None:
        """How gradients are scaled and whether the step is skipped; None if the host knows that it is."""
        return controls_of(
            works,
            sharding,
            self.param_groups[0],
            self._log,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            clips_norm=clips_norm,
        )

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last step, before clipping, if ``max_grad_norm`` is set."""
        return self._log.get("grad_norm")

    @property
    def num_skipped_steps(self) -> int:
        """Number of steps, and of curvature estimates, that ``nonfinite="skip"`` skipped.

        This includes steps that a ``GradScaler`` left to the optimizer to skip, as it does if the step is
        fused or ``capturable``; otherwise it skips them itself and they are not counted. The count belongs to
        this object and is not part of ``state_dict``. Reading it waits for the device.
        """
        return int(self._log.get("num_skipped", 0))

    # --- saving and loading ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with dtypes as names: torch.distributed.checkpoint cannot store dtypes in groups."""
        saved = super().state_dict()
        saved["param_groups"] = list(map(saved_state.with_dtype_names, saved["param_groups"]))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, bit for bit: float32 state of a bf16 weight stays float32.

        A state dict of another optimizer with the same state keys (torch's AdamW, for Adam's direction;
        torch's Muon, for Muon's) is accepted too. Its state and step counts are loaded; learning rate, betas
        and the other options of this optimizer are kept, because they mean something else there.

        Parameters with names (``model.named_parameters()``, ``param_groups``) are found by name if both have
        the same names, else by position, as in torch.
        """
        # Registered last, so that it runs after the user's hooks.
        handle = self.register_load_state_dict_pre_hook(
            lambda optimizer, saved: saved_state.made_loadable(cast("SafeOptimizer", optimizer), saved)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for option in options.WHOLE_STEP:  # the defaults of groups that are added later
            self.defaults[option] = self.param_groups[0][option]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_log": self._log, "_kinds": self._kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)
            for param in group["params"]:
                if param in self.state:
                    self.state[param] = saved_state.adopted(self, param, group, self.state[param])


def _without_autocast() -> AbstractContextManager[Any]:
    """Turn autocast off. It is for the model: in a step it would round products, or refuse mixed dtypes."""
    kinds = [kind for kind in _AUTOCASTING if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
