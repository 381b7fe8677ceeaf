"""The base class of the trust-ratio family: options, what is refused, and the choice of engine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from merit_optim.optim import validate
from merit_optim.optim.algorithm import NORMS, Norm
from merit_optim.optim.base import NonFinite, SafeOptimizer
from merit_optim.optim.engines import direct, eager, fused_unavailable, interpreting
from merit_optim.optim.engines.placements import is_sharded, refuse_inexact
from merit_optim.optim.engines.sharded import Sharding
from merit_optim.optim.engines.work import Controls, Work, apart, names_of
from merit_optim.optim.statistics import Recorder, UpdateStatistics

if TYPE_CHECKING:
    from merit_optim.optim.engines.fused import FusedEngine, FusedPart


class EngineOptions(TypedDict, total=False):
    """Options that say how a step is computed, the same for the whole family."""

    matrix_dims: int | None
    state_dtype: torch.dtype
    nonfinite: NonFinite
    max_grad_norm: float | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


class TrustRatioOptimizer(SafeOptimizer):
    """Adam's moments, a trust ratio, and a clip; see ``algorithm.py`` for the equations."""

    STATE_KEYS: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    _recorder: Recorder | None = None
    _engines: dict[torch.device, FusedEngine] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        clip: float | None,
        element_wise: bool,
        weight_bound: bool,
        norm: Norm,
        bias_correction: bool,
        matrix_dims: int | None = None,
        state_dtype: torch.dtype = torch.float32,
        nonfinite: NonFinite = "propagate",
        max_grad_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        # Shapes given by the user, to tell a parameter from a flat piece that a sharding library put
        # in its place.
        self._shapes: set[torch.Size] = set()
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "clip": clip,
                "element_wise": element_wise,
                "weight_bound": weight_bound,
                "norm": norm,
                "bias_correction": bias_correction,
                "matrix_dims": matrix_dims,
                "state_dtype": state_dtype,
                "nonfinite": nonfinite,
                "max_grad_norm": max_grad_norm,
                "maximize": maximize,
                "foreach": foreach,
                "fused": fused,
                "capturable": capturable,
                "differentiable": differentiable,
            },
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        validate.epsilon(group["eps"], "1e-6")
        validate.one_of("norm", group["norm"], NORMS)
        validate.optional_count("matrix_dims", group["matrix_dims"])
        if group["clip"] is not None:
            validate.positive("clip", group["clip"], "None for no clip")
        if group["fused"]:
            for other in ("foreach", "differentiable"):
                if group[other]:
                    raise ValueError(f"fused=True and {other}=True exclude each other; choose one")
        if group["foreach"] and group["differentiable"]:
            raise ValueError("foreach=True and differentiable=True exclude each other; choose one")
        for option in ("element_wise", "weight_bound", "bias_correction"):
            validate.flag(option, group[option])
        for option in ("foreach", "fused"):
            if group[option] is not None:
                validate.flag(option, group[option], ", or None")

    def _check_engine(self, group: dict[str, Any]) -> None:
        if group["fused"] and (reason := fused_unavailable()):
            raise RuntimeError(
                f"fused=True cannot be had: {reason}. Leave fused=None for the fastest engine there is."
            )

    def _check_parameter(self, name: str, param: Tensor) -> None:
        super()._check_parameter(name, param)
        if is_lazy(param):
            raise TypeError(
                f"{name} has no shape yet; its rows and columns are known after one forward pass of the "
                "model. Give it to the optimizer then."
            )
        if getattr(param, "_fsdp_flattened", False):
            raise TypeError(
                f"{name} is a flat parameter of FSDP1: its rows and columns are gone, and with them the "
                "trust ratios. Use FSDP2 (torch.distributed.fsdp.fully_shard), or FSDP1 with no optimizer "
                "of this family."
            )
        refuse_inexact(name, param)
        if is_sharded(param) and self.defaults["differentiable"]:
            raise TypeError(
                f"{name} is sharded, and a differentiable step knows no other ranks. Use "
                "differentiable=False, or whole parameters."
            )

    def _check_fused(self, name: str, param: Tensor, group: dict[str, Any]) -> None:
        """Raise if a parameter cannot have the fused engine that was demanded for it."""
        from merit_optim.optim.engines.fused import refusal

        reason = refusal(group, param)
        if param.device.type != "cuda" and not interpreting():
            reason = f"it is on {param.device}, and the fused engine runs on CUDA devices"
        if reason:
            raise ValueError(
                f"fused=True, but {name} of shape {tuple(param.shape)} cannot be fused: {reason}. Move or "
                "change it, or leave fused=None for the fastest engine each parameter can have."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.param_groups[-1]["fused"]:
            try:
                for name, param in self._named(len(self.param_groups) - 1):
                    self._check_fused(name, param, self.param_groups[-1])
            except ValueError:
                self.param_groups.pop()
                raise
        self._shapes.update(param.shape for param in self.param_groups[-1]["params"])

    def _init_state(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param.ndim == 1 and param.shape not in self._shapes:
            raise TypeError(
                f"a flat parameter of {param.numel()} elements stands where other shapes were given to "
                f"{type(self).__name__}. DeepSpeed ZeRO and Megatron's distributed optimizer do this: rows "
                "and columns are gone, and with them the trust ratios. Use FSDP2 or DDP, or, if the "
                "parameter is yours, add_param_group."
            )
        super()._init_state(param, group, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_shapes"):  # copied or unpickled: __init__ did not run
            self._shapes = {param.shape for group in self.param_groups for param in group["params"]}

    @staticmethod
    def _fuses(group: dict[str, Any], device: torch.device) -> bool:
        """Whether the fused engine is asked for, or chosen because nothing else was, and can run.

        Asked for, it may still be out of reach: with a checkpoint from a machine that has it.
        """
        if group["fused"] is None:
            wanted = group["foreach"] is None and not group["differentiable"] and device.type == "cuda"
        else:
            wanted = group["fused"] and (device.type == "cuda" or interpreting())
        return bool(wanted) and fused_unavailable() is None

    def _step_device(self, param: Tensor, group: dict[str, Any]) -> torch.device:
        # Many small additions on the host would cost more than the fused step itself.
        return param.device if self._fuses(group, param.device) else super()._step_device(param, group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        fused = all(
            self._fuses(group, param.device) for group in self.param_groups for param in group["params"][:1]
        )
        return fused or super()._step_supports_amp_scaling

    def _leaves_the_graph(self) -> bool:
        return self._recorder is not None or super()._leaves_the_graph()

    def _controls(
        self, works: list[Work], sharding: Sharding | None, *, clip: bool = True
    ) -> Controls | None:
        if self._recorder is not None:
            self._recorder.clear()  # also where the step will be skipped
        return super()._controls(works, sharding, clip=clip)

    def _update(self, works: list[Work], controls: Controls, sharding: Sharding | None) -> None:
        if torch.compiler.is_compiling() or self.defaults["differentiable"]:
            self._count_step(works, controls)
            direct.step(works, controls)
            return
        parts: list[eager.Part | FusedPart] = []
        for device, on_device in apart(works, controls).items():
            fused: list[Work] = []
            rest: list[Work] = []
            for work in on_device:
                (fused if self._fuses(work.group, device) else rest).append(work)
            if fused:
                fused = [self._counted_on(device, work) for work in fused]
                fused_part = self._fused_engine(device).part_of(fused, controls[device])
                parts.append(fused_part)
                rest += fused_part.rest
            self._count_step(rest, controls)  # the fused engine counts its own
            parts += eager.parts_of(rest, controls)
        for part in parts:
            part.moments()
        if sharding is not None:
            owners = {p: owner for work in works for p, owner in zip(work.params, work.owners, strict=True)}
            sharding.reduce((place for part in parts for place in part.places), owners)
        for part in parts:
            part.apply(self._recorder)
        if sharding is not None and self._recorder is not None:
            names = {o: name for work in works for o, name in zip(work.owners, names_of(work), strict=True)}
            sharding.merge_statistics(self._recorder, names)

    def _counted_on(self, device: torch.device, work: Work) -> Work:
        """The work, with step counts that came from elsewhere brought to where the kernels count."""
        if set(map(Tensor.get_device, work.steps)) != {work.params[0].get_device()}:
            for owner, step in zip(work.owners, work.steps, strict=True):
                self.state[owner]["step"] = step.to(device, torch.float32)
            work = work._replace(steps=[self.state[owner]["step"] for owner in work.owners])
        return work

    def _fused_engine(self, device: torch.device) -> FusedEngine:
        from merit_optim.optim.engines.fused import FusedEngine

        if self._engines is None:
            self._engines = {}
        if device not in self._engines:
            self._engines[device] = FusedEngine(device)
        return self._engines[device]

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict[str, UpdateStatistics]]:
        """Measure the update of every parameter in the steps taken inside.

        Each step replaces the statistics of the one before. Steps outside pay nothing. The names are
        those given with the parameters (``model.named_parameters()``, or ``param_groups``).

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
                    f"{count} parameters are named {name!r}, and statistics are kept by name; give the "
                    "optimizer names that differ, as param_groups(model) does"
                )
        outer, self._recorder = self._recorder, Recorder()
        try:
            yield self._recorder
        finally:
            if outer is not None and self._recorder:
                outer.clear()
                outer.update(self._recorder)
            self._recorder = outer
