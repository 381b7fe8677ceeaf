"""What every optimizer of this package shares: the order of a step, its state, and its safety.

A step gathers the parameters that have gradients, decides what happens to those gradients (loss scale,
norm clipping, skipping a bad step), and hands them to the subclass's ``_update``. Everything that can
be refused is refused before anything is changed.
"""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, _use_grad_for_differentiable

from merit_optim.optim import validate
from merit_optim.optim.engines.gradients import all_finite, total_norm
from merit_optim.optim.engines.placements import any_sharded, is_sharded, local
from merit_optim.optim.engines.sharded import Sharding
from merit_optim.optim.engines.work import Control, Controls, Work, apart, by_device, items_of

NonFinite = Literal["propagate", "skip", "raise"]
NONFINITE: tuple[NonFinite, ...] = ("propagate", "skip", "raise")

# With float32's exponents at least: squares of ordinary gradients are zero in float16.
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

_KEYS_OF_TORCH = {"params", "param_names", "initial_lr"}

# These concern the step as a whole, so groups cannot differ in them.
WHOLE_STEP_OPTIONS = ("max_grad_norm", "nonfinite")


_GRAD, _LAYOUT = operator.attrgetter("grad"), operator.attrgetter("layout")


class _AsSaved:
    """Carries a tensor through ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SafeOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that checks its input and keeps its promises about state.

    Subclasses name themselves and their state tensors, and implement ``_update``.
    """

    ALGORITHM: ClassVar[str]
    """Stands in every parameter group, so that a checkpoint tells whose options it holds."""
    STATE_KEYS: ClassVar[tuple[str, ...]]

    _sharding: Sharding | None = None
    _checked: Sequence[Any] = ()
    """The options of all groups when they were found to be allowed."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        # In a dict, for torch.compile forgets what a step assigns to attributes of an optimizer.
        self._log: dict[str, Tensor] = {}
        self._check_group(defaults)
        self._check_engine(defaults)
        validate.parameters(params)
        super().__init__(params, {**defaults, "algorithm": self.ALGORITHM})

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise if an option of a parameter group is not allowed."""
        validate.learning_rate(group["lr"])
        validate.betas(group["betas"])
        validate.at_least_zero("weight_decay", group["weight_decay"])
        validate.one_of("nonfinite", group["nonfinite"], NONFINITE)
        validate.one_of("state_dtype", group["state_dtype"], STATE_DTYPES)
        if group["max_grad_norm"] is not None:
            validate.positive("max_grad_norm", group["max_grad_norm"], "None for no clipping")
        for option in ("maximize", "capturable", "differentiable"):
            validate.flag(option, group[option])

    def _check_engine(self, group: dict[str, Any]) -> None:
        """Raise if a new group demands what cannot be had here. A loaded one may: it comes from elsewhere."""

    def _check_whole_step(self, group: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Raise where groups differ in what concerns the step as a whole."""
        for option in WHOLE_STEP_OPTIONS:
            for other in others:
                if other[option] != group[option]:
                    raise ValueError(
                        f"parameter groups have {option}={other[option]!r} and {group[option]!r}; it "
                        "concerns the step as a whole. Give it to the optimizer, not to a group."
                    )

    def _check_changed_options(self) -> None:
        """Check options that were changed in ``param_groups``, before a step changes anything by them."""
        values = list(itertools.chain.from_iterable(map(dict.values, self.param_groups)))
        if len(values) == len(self._checked) and all(map(operator.is_, values, self._checked)):
            return
        keys = itertools.chain.from_iterable(self.param_groups)
        pairs = itertools.zip_longest(keys, values, self._checked)
        changed = {key for key, now, before in pairs if now is not before}
        on_device = any(
            isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in self.param_groups
        )
        if on_device and torch.cuda.is_current_stream_capturing():
            return  # nothing can be read from there now; the next step looks again
        only_rates = changed == {"lr"}  # a scheduler's, in every step
        for group in self.param_groups:
            if only_rates:
                validate.learning_rate(group["lr"])
            else:
                self._check_group(group)
        self._check_whole_step(self.param_groups[0], self.param_groups)
        self._checked = values

    def _check_parameter(self, name: str, param: Tensor) -> None:
        """Raise if a parameter cannot be optimized."""
        if not param.is_floating_point():
            way_out = (
                "In its place, keep a real one with a last dimension of 2, and use torch.view_as_complex of "
                "it in the model."
                if param.is_complex()
                else "Leave it out, or convert it."
            )
            raise TypeError(
                f"{name} has dtype {param.dtype}; {type(self).__name__} takes real floating-point "
                f"parameters. {way_out}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their own options, to those being optimized."""
        if isinstance(param_group, dict):
            self._check_option_names(param_group)
            options = {**self.defaults, **param_group}
            self._check_group(options)
            self._check_engine(options)
            self._check_differentiable(param_group)
            self._check_whole_step(options, self.param_groups)
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            for name, param in self._named(index):
                self._check_parameter(name, param)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_differentiable(self, param_group: dict[str, Any]) -> None:
        """Raise where a group differs from the optimizer, by which torch records a step or does not."""
        whole = self.defaults["differentiable"]
        value = param_group.get("differentiable", whole)
        if value != whole:
            raise ValueError(
                f"a parameter group has differentiable={value!r}, the optimizer {whole!r}; it concerns the "
                "step as a whole. Give it to the optimizer, not to a group."
            )

    def _check_option_names(self, param_group: dict[str, Any]) -> None:
        """Raise where an option is misspelt; other keys are the user's own, as in torch's optimizers."""
        for key in param_group.keys() - self.defaults.keys() - _KEYS_OF_TORCH:
            if nearest := difflib.get_close_matches(key, self.defaults, n=1, cutoff=0.85):
                raise ValueError(
                    f"a parameter group has {key!r}, which {type(self).__name__} does not know; did you mean "
                    f"{nearest[0]!r}?"
                )

    def _named(self, group_index: int) -> Iterator[tuple[str, Tensor]]:
        group = self.param_groups[group_index]
        names = group.get("param_names")
        for i, param in enumerate(group["params"]):
            yield names[i] if names else f"parameter {i} of group {group_index}", param

    # --- the step -----------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells ``GradScaler`` to leave scaling and skipping to the step, which needs no host sync."""
        return bool(self.defaults["capturable"])

    @_use_grad_for_differentiable
    def step(  # type: ignore[override]  # the base class declares overloads, which a decorator hides
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.
        """
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling() and self._leaves_the_graph():
            self._take_step_uncompiled()
        else:
            self._take_step()
        return loss

    def _take_step(self) -> None:
        works = self._gather()
        sharding = self._find_sharding()
        if sharding is not None:
            works = [local(work) for work in works]
        elif not works:
            if "grad_norm" in self._log:
                self._log["grad_norm"] = torch.zeros_like(self._log["grad_norm"])
            return
        controls = self._controls(works, sharding)
        if controls is not None:
            self._update(works, controls, sharding)

    @_disable_dynamo
    def _take_step_uncompiled(self) -> None:
        self._take_step()

    def _leaves_the_graph(self) -> bool:
        """Whether the step cannot be compiled: each rank would take its shard for the whole."""
        return self._is_sharded()

    def _is_sharded(self) -> bool:
        return any(any_sharded(group["params"]) for group in self.param_groups)

    def _find_sharding(self) -> Sharding | None:
        """What sharded parameters have to exchange; None where there are none."""
        if not self._is_sharded():
            return None
        if self._sharding is None or not self._sharding.fits(self.param_groups):
            self._sharding = Sharding(self.param_groups)
        return self._sharding

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        """Count the step, and change parameters and state."""
        raise NotImplementedError

    def _gather(self) -> list[Work]:
        """The groups that have gradients, with the tensors of the parameters that have one."""
        if not torch.compiler.is_compiling():
            self._check_changed_options()
        works: list[Work] = []
        for index, group in enumerate(self.param_groups):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            steps: list[Tensor] = []
            states: list[list[Tensor]] = [[] for _ in self.STATE_KEYS]
            self._init_group(group, params, grads, steps, *states)
            if params:
                works.append(Work(index, group, params, params, grads, steps, states))
        return works

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        *states: list[Tensor],
    ) -> None:
        """Fill the lists with the tensors of the parameters that have gradients.

        torch.compile knows this method by its name and runs it as it is instead of tracing it, which
        is why it takes lists to fill and returns nothing.
        """
        # With hundreds of parameters this is most of what a step costs the host: no loop does more than
        # one thing, and what never happens is looked for only once something has.
        params += group["params"]
        grads += map(_GRAD, params)
        if type(None) in set(map(type, grads)):
            params[:] = [param for param in params if param.grad is not None]
            grads[:] = map(_GRAD, params)
        if set(map(_LAYOUT, grads)) - {torch.strided}:
            self._refuse_layout(params, grads)
        of_params: list[Any] = list(map(self.state.get, params))
        if not all(of_params):
            of_params = [self._state_of(param, group) for param in params]
        steps += [state["step"] for state in of_params]
        for key, tensors in zip(self.STATE_KEYS, states, strict=True):
            tensors += [state[key] for state in of_params]

    def _refuse_layout(self, params: list[Tensor], grads: list[Tensor]) -> None:
        param, grad = next(
            pair for pair in zip(params, grads, strict=True) if pair[1].layout != torch.strided
        )
        raise TypeError(
            f"the gradient of {self._name_of(param)} (shape {tuple(param.shape)}) has layout "
            f"{grad.layout}; {type(self).__name__} needs dense gradients. For an embedding, "
            "use sparse=False."
        )

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, made where there is none."""
        state: dict[str, Any] = self.state.get(param) or {}
        if not state:
            self._check_parameter(f"{self._name_of(param)} of shape {tuple(param.shape)}", param)
            self._init_state(param, group, state)
            self.state[param] = state
        return state

    def _name_of(self, param: Tensor) -> str:
        named = (pair for index in range(len(self.param_groups)) for pair in self._named(index))
        return next(name for name, other in named if other is param)

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(param, group))
        for key in self.STATE_KEYS:
            dtype = self._state_dtype(param, group)
            state[key] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def _step_device(self, param: Tensor, group: dict[str, Any]) -> torch.device:
        """Where the step count stands: with the parameter if the device decides about skipping a step."""
        on_device = group["capturable"] or group["nonfinite"] == "skip"
        return param.device if on_device else torch.device("cpu")

    @staticmethod
    def _state_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
        return torch.float64 if param.dtype == torch.float64 else group["state_dtype"]

    @staticmethod
    def _count_step(works: list[Work], controls: Controls) -> None:
        for device, on_device in apart(works, controls).items():
            skip = controls[device].skip
            steps = [step for work in on_device for step in work.steps]
            if not steps:
                continue
            if skip is None:
                torch._foreach_add_(steps, 1)
            else:
                taken = (~skip).float().to(steps[0].device)
                torch._foreach_add_(steps, [taken] * len(steps))

    # --- what happens to the gradients ---------------------------------------------------------------

    def _controls(
        self, works: list[Work], sharding: Sharding | None, *, clip: bool = True
    ) -> Controls | None:
        """Decide, for each device, how gradients are scaled and whether the step is skipped.

        Ranks that share parameters decide together. ``None`` says that the host knows already that the
        step is skipped.
        """
        options = self.param_groups[0]
        policy, max_norm = options["nonfinite"], options["max_grad_norm"] if clip else None
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # An overflow that the scaler found is its own to deal with: the step is skipped below.
        if policy == "raise" and not (found_inf is not None and found_inf.item()):
            self._raise_on_nonfinite(works, sharding)

        on_devices = by_device(works)
        if policy != "skip" and max_norm is None and grad_scale is None and found_inf is None:
            return dict.fromkeys(on_devices, Control())
        grads = {
            device: [g for work in on_device for g in work.grads] for device, on_device in on_devices.items()
        }
        # A rank may have no gradients, but only where others have.
        first = next(iter(grads)) if sharding is None or grads else sharding.device

        scale = None if grad_scale is None else grad_scale.to(first).double().reciprocal().float()
        if max_norm is not None:
            norm = total_norm(grads) if sharding is None else sharding.total_norm(works, first)
            norm = norm if scale is None else norm * scale
            self._log["grad_norm"] = norm.detach()
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            scale = factor if scale is None else factor * scale

        skip = None if found_inf is None else found_inf.to(first) > 0
        if policy == "skip":
            bad = ~all_finite(grads, first)
            bad = bad if sharding is None else sharding.any(bad)
            skip = bad if skip is None else skip | bad
        if skip is not None:
            if "num_skipped" not in self._log:
                self._log["num_skipped"] = torch.zeros((), dtype=torch.int64, device=first)
            # In place: a replayed CUDA graph goes on counting where this stands.
            self._log["num_skipped"].add_(skip.to(self._log["num_skipped"].device))
            if first.type == "cpu" and len(grads) <= 1 and not torch.compiler.is_compiling():
                if skip:
                    return None
                skip = None
        return {
            device: Control(
                None if scale is None else scale.to(device, non_blocking=True),
                None if skip is None else skip.to(device, non_blocking=True),
            )
            for device in grads
        }

    @property
    def grad_norm(self) -> Tensor | None:
        """The gradient norm of the last step, before clipping, where ``max_grad_norm`` is set."""
        return self._log.get("grad_norm")

    @property
    def num_skipped_steps(self) -> int:
        """Steps, and estimates of the curvature, that ``nonfinite="skip"`` left out.

        Also those that a ``GradScaler`` left to the optimizer to skip, which it does where the step is fused
        or ``capturable``; else it skips them itself and they are not counted. The count is of this object: a
        ``state_dict`` has none. Reading waits for the device.
        """
        return int(self._log.get("num_skipped", 0))

    @staticmethod
    def _raise_on_nonfinite(works: list[Work], sharding: Sharding | None) -> None:
        bad = [i for i in items_of(works) if not all_finite({i.grad.device: [i.grad]}, i.grad.device)]
        if bad:
            item = bad[0]
            count = int((~item.grad.isfinite()).sum())
            message = (
                f"the gradient of {item.name} (shape {tuple(item.param.shape)}) holds {count} NaN or "
                f"infinite values of {item.grad.numel()}"
            )
        else:
            message = "a gradient on another rank holds NaN or infinite values"
        # Every rank raises, or the others would wait for this one.
        if bad if sharding is None else sharding.any_rank(bool(bad)):
            raise FloatingPointError(
                f"{message}; nothing was changed. nonfinite='skip' leaves such steps out, "
                "nonfinite='propagate' takes them."
            )

    # --- state in and out ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with dtypes by their names: torch.distributed.checkpoint knows no others in groups."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group["state_dtype"] = str(group["state_dtype"]).removeprefix("torch.")
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, bit for bit: float32 state of a bf16 weight stays float32.

        A state dict of another optimizer with the same state keys (torch's AdamW, for the trust-ratio
        family) is taken too. Its moments and step counts are loaded; learning rate, betas and the other
        options stay those of this optimizer, for they mean something else there.
        """
        # Registered last, so it sees what the user's own hooks made of the state dict.
        handle = self.register_load_state_dict_pre_hook(SafeOptimizer._before_load)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for option in WHOLE_STEP_OPTIONS:  # what a group that is added later has by default
            self.defaults[option] = self.param_groups[0][option]

    @staticmethod
    def _before_load(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self = cast("SafeOptimizer", optimizer)
        validate.saved_state(state_dict)
        groups = state_dict["param_groups"]
        if _num_parameters(groups) != _num_parameters(self.param_groups):
            return state_dict  # torch itself complains about a wrong number, and says it well
        saved_ids = [i for group in groups for i in group["params"]]
        named = [pair for index in range(len(self.param_groups)) for pair in self._named(index)]
        params: dict[int, tuple[str, Tensor]] = dict(zip(saved_ids, named, strict=True))
        ours = all(group.get("algorithm") == self.ALGORITHM for group in groups)
        state = {}
        for param_id, saved in state_dict["state"].items():
            if param_id in params:
                name, param = params[param_id]
                self._check_saved(name, param, saved)
                # What this optimizer does not keep up to date would be wrong when another reads it again.
                known = saved if ours else {key: saved[key] for key in ("step", *self.STATE_KEYS) if saved}
                saved = {k: _AsSaved(v) if isinstance(v, Tensor) else v for k, v in known.items()}
            state[param_id] = saved
        groups = [
            with_dtype(saved)
            if saved.get("algorithm") == self.ALGORITHM
            else {**current, "params": saved["params"]}
            for saved, current in zip(groups, self.param_groups, strict=True)
        ]
        options = [{**self.defaults, **group} for group in groups]
        try:
            for group in options:
                self._check_group(group)
            self._check_whole_step(options[0], options)
        except ValueError as error:
            error.add_note(
                "So says the saved state; change it there, in its 'param_groups', before it is loaded."
            )
            raise
        return {**state_dict, "state": state, "param_groups": groups}

    def _check_saved(self, name: str, param: Tensor, saved: dict[str, Any]) -> None:
        missing = {"step", *self.STATE_KEYS} - set(saved)
        if saved and missing:
            raise ValueError(
                f"the saved state of {name} has {sorted(saved)} but not {sorted(missing)}; "
                f"{type(self).__name__} can load only optimizers with the state "
                f"{['step', *self.STATE_KEYS]}. Start it with fresh state instead."
            )
        for key in self.STATE_KEYS if saved else ():
            value = saved[key]
            if is_sharded(param) and not is_sharded(value):
                raise ValueError(
                    f"{name} is a DTensor and its saved {key} is not; load whole states through "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards them."
                )
            if is_sharded(value) and not is_sharded(param):
                raise ValueError(
                    f"the saved {key} of {name} is a DTensor and the parameter is not; save whole states: "
                    "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, full_state_dict=True"
                )
            if tuple(value.shape) != tuple(param.shape):
                raise ValueError(
                    f"the saved {key} of {name} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(param.shape)}; parameters must be given in the order they were saved in."
                )
            if is_sharded(param) and is_sharded(value) and param.placements != value.placements:
                raise ValueError(
                    f"the saved {key} of {name} is placed as {value.placements}, the parameter as "
                    f"{param.placements}; torch.distributed.checkpoint loads states into other placements."
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_log": self._log}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)
            for param in group["params"]:
                if param in self.state:
                    self.state[param] = self._adopt(param, group, self.state[param])

    def _adopt(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Loaded state in this optimizer's own dtypes and on the right devices."""
        adopted = {}
        for key, value in saved.items():
            value = value.tensor if isinstance(value, _AsSaved) else value
            if key == "step":
                device = self._step_device(param, group)
                value = torch.as_tensor(value, dtype=torch.float32, device=device)
            elif key in self.STATE_KEYS:
                value = value.to(param.device, self._state_dtype(param, group))
            elif isinstance(value, Tensor):
                value = value.to(param.device)
            adopted[key] = value
        return adopted


def with_dtype(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the dtype of the state that they name, as ``state_dict`` does."""
    name = options.get("state_dtype")
    return {**options, "state_dtype": getattr(torch, name, name)} if isinstance(name, str) else options


def _num_parameters(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
