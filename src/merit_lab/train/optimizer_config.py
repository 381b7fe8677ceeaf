"""The optimizer's part of the configuration of a training run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from merit_lab.checks import check_at_least, check_choice, is_number
from merit_lab.json_values import decode
from merit_lab.models.config import PRESETS
from merit_lab.models.names import num_parameters
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.train.optimizer_names import check_name, is_external, must_be_trusted
from merit_lab.train.optimizer_options import default_of, parse_options
from merit_optim.settings import SETTINGS

Schedule = Literal["cosine", "wsd"]
MeritPart = Literal["clip", "weight-bound", "element-wise"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: str = "merit"
    """adamw, lion, sophiag, lamb, maxlamb, merit, muon, normuon, orscale, soap, muon-merit,
    soap-merit; torch:NAME, pytorch-optimizer:NAME; or MODULE:CLASS for your own optimizer."""
    lr: float | None = None
    """Peak learning rate. None: the paper's for the GPT-2 model nearest in size; it has adamw, lion, sophiag,
    lamb and merit."""
    betas: tuple[float, float] | None = None
    """Decay of the two moments. None: the paper's, or the default of an optimizer that it does not have."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors are not decayed."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this norm. None: no clipping."""
    schedule: Schedule = "cosine"
    """How the learning rate decays: cosine, right after the warm-up; wsd (warm-up, stable, decay), linearly
    over the last steps."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises to its peak."""
    decay: float = 0.2
    """With wsd, the share of the steps in which the learning rate decays."""
    final: float = 0.1
    """Final learning rate, as a share of the peak."""
    without: tuple[MeritPart, ...] = ()
    """Parts of MERIT to leave out, as in the paper's ablations."""
    options: tuple[str, ...] = ()
    """Other arguments of the optimizer, as OPTION=VALUE: momentum=0.9, betas=0.9,0.99,0.999."""
    overrides: tuple[str, ...] = ()
    """Options for some parameters only, as PATTERN:OPTION=VALUE: "*norm*:lr=0.01", the peak of these."""
    rest: str | None = None
    """A second optimizer, named as above, for everything but hidden matrices. None: one optimizer for all."""
    rest_lr: float | None = None
    """Peak learning rate of the second optimizer, with the same schedule. None: the paper's, as for lr."""
    rest_options: tuple[str, ...] = ()
    """Other arguments of the second optimizer, as OPTION=VALUE."""

    def __post_init__(self) -> None:
        _check_optimizer_name("optimizer.name", self.name)
        if self.rest is not None:
            _check_optimizer_name("optimizer.rest", self.rest)
        elif self.rest_lr is not None or self.rest_options:
            raise ValueError(
                "optimizer.rest_lr and optimizer.rest_options are for a second optimizer, but there is none; "
                "name it with --optimizer.rest, as in --optimizer.rest adamw"
            )
        for part in self.without:
            check_choice("optimizer.without", part, get_args(MeritPart))
        if self.without and self.name != "merit":
            raise ValueError(
                f"optimizer.without is {', '.join(self.without)}, but {self.name} has no such parts; only "
                "merit has"
            )
        if "betas" in self.options_by_name() and self.betas is not None:
            raise ValueError(
                "betas is given in optimizer.options and as optimizer.betas; give only one of them"
            )
        self.rest_options_by_name()
        self.overrides_by_pattern()
        for name in ("lr", "rest_lr", "weight_decay"):
            if (value := getattr(self, name)) is not None:
                check_at_least(f"optimizer.{name}", value, 0.0)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"optimizer.max_grad_norm is {self.max_grad_norm!r}; it must be above 0, or None"
            )
        check_choice("optimizer.schedule", self.schedule, get_args(Schedule))
        for name in ("warmup", "decay", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)!r}; it must be from 0 to 1")
        if self.schedule != "wsd" and self.decay != OptimizerConfig.decay:
            raise ValueError(
                f"optimizer.decay is {self.decay!r}, but the schedule is {self.schedule}; it is for "
                "--optimizer.schedule wsd"
            )

    def options_by_name(self) -> dict[str, Any]:
        """Return the other arguments of the optimizer."""
        return parse_options(self.options, "optimizer.options")

    def rest_options_by_name(self) -> dict[str, Any]:
        """Return the other arguments of the second optimizer."""
        return parse_options(self.rest_options, "optimizer.rest_options")

    def classes_to_import(self) -> list[str]:
        """Return the MODULE:CLASS names that would be imported: optimizers, and classes in their options."""
        options = [*self.options_by_name().values(), *self.rest_options_by_name().values()]
        named = [name for name in (self.name, self.rest, *options) if isinstance(name, str)]
        return [name for name in dict.fromkeys(named) if must_be_trusted(name)]

    def overrides_by_pattern(self) -> dict[str, dict[str, Any]]:
        """Return the overrides as ``param_groups`` takes them; if an option is given twice, the last wins."""
        options: dict[str, dict[str, Any]] = {}
        for text in self.overrides:
            pattern, _, setting = text.rpartition(":")
            option, _, value = setting.partition("=")
            try:
                options.setdefault(pattern, {})[option] = decode(value)
            except ValueError:
                pattern = ""
            if not pattern or not option:
                raise ValueError(
                    f"optimizer.overrides has {text!r}; write PATTERN:OPTION=VALUE with the value as JSON, "
                    "as in *embedding*:element_wise=false"
                )
            if option == "lr" and not is_number(options[pattern]["lr"], least=0.0):
                raise ValueError(
                    f"optimizer.overrides has {text!r}; a learning rate must be a finite number of at least "
                    "0, as in *norm*:lr=0.01"
                )
        return options

    def rate(self, step: int, steps: int, peak: float) -> float:
        """Return the learning rate of a step, counted from 0, in a run of ``steps`` steps."""
        return learning_rate(
            step,
            steps=steps,
            peak=peak,
            warmup=self.warmup,
            final=self.final,
            decay=self.decay if self.schedule == "wsd" else None,
        )

    def resolve(self, model: AnyModelConfig) -> Self:
        """Fill in the learning rates for a model."""
        lr, rest_lr = self.lr, self.rest_lr
        if lr is None:
            lr = _paper_rate(
                self.name, model, f"--optimizer.lr, or --lr {self.name}=RATE where optimizers are compared"
            )
        if rest_lr is None and self.rest is not None:
            rest_lr = _paper_rate(self.rest, model, "--optimizer.rest-lr")
        return dataclasses.replace(self, lr=lr, rest_lr=rest_lr)


def learning_rate(
    step: int, *, steps: int, peak: float, warmup: float, final: float, decay: float | None = None
) -> float:
    """Return the learning rate of a step, counted from 0.

    Args:
        step: which step, from 0 to ``steps - 1``.
        steps: length of the run.
        peak: highest rate, reached by the last step of the warm-up.
        warmup: share of the steps that warm up; at least one step if it is above 0.
        final: share of the peak at the last step.
        decay: share of the steps with linear decay; None for a cosine.

    Example:
        >>> [round(learning_rate(s, steps=5, peak=1.0, warmup=0.2, final=0.1), 3) for s in range(5)]
        [1.0, 0.868, 0.55, 0.232, 0.1]
        >>> [round(learning_rate(s, steps=5, peak=1.0, warmup=0, final=0.1, decay=0.4), 3) for s in range(5)]
        [1.0, 1.0, 1.0, 0.55, 0.1]
    """
    warming = max(1, round(warmup * steps)) if warmup > 0 else 0
    if step < warming:
        return peak * (step + 1) / warming
    # The last step before the decay has the peak; without a warm-up, the first step has it.
    last_at_peak = max(warming - 1, 0)
    if decay is not None:
        last_at_peak = max(last_at_peak, steps - 1 - round(decay * steps))
    progress = max(0, step - last_at_peak) / max(1, steps - 1 - last_at_peak)
    left = 1 - progress if decay is not None else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (final + (1 - final) * left)


def _check_optimizer_name(field: str, name: str) -> None:
    if is_external(name):
        check_name(field, name)
    else:
        others = "torch:NAME, pytorch-optimizer:NAME", "MODULE:CLASS for your own"
        check_choice(field, name, tuple(SETTINGS), *others)


def _paper_rate(name: str, model: AnyModelConfig, way_out: str) -> float:
    """Return the paper's peak learning rate for the GPT-2 nearest in size."""
    rates = {} if is_external(name) else SETTINGS[name].learning_rates
    if not rates:
        # To find the class refuses a name that does not exist; one of any module is not imported for this.
        default = None if must_be_trusted(name) else default_of(name, "lr")
        of_class = f" (the default of its class is {default:g})" if isinstance(default, int | float) else ""
        raise ValueError(f"the paper gives no learning rate for {name}; pass {way_out}{of_class}")
    size = math.log(num_parameters(model))
    nearest_preset = min(rates, key=lambda preset: abs(math.log(num_parameters(PRESETS[preset])) - size))
    return rates[nearest_preset]
