"""The configuration of a training run: dataclasses that validate themselves and convert to and from JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from merit_lab.checks import LARGEST_SIZE, check_at_least, check_choice, check_size, is_number
from merit_lab.json_values import build
from merit_lab.models.config import PRESETS, ModelConfig
from merit_lab.models.names import num_parameters
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.runs.settings import flatten
from merit_lab.train.optimizer_options import (
    check_name,
    default_of,
    is_external,
    must_be_trusted,
    parse_options,
    parse_value,
)
from merit_optim.settings import SETTINGS

Schedule = Literal["cosine", "wsd"]
MeritPart = Literal["clip", "weight-bound", "element-wise"]
Precision = Literal["auto", "bf16", "float32"]
Parallel = Literal["ddp", "fsdp2"]
NonFinite = Literal["stop", "skip"]

_MOST_TOKENS = 2**62  # tokens, and rows over all steps, are counted in 64 bits

TOKENS_PER_PARAMETER = 20  # the default length: about compute-optimal (Hoffmann et al., 2022)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: str = "merit"
    """adamw, lion, sophiag, lamb, lamb-uncorrected, maxlamb, merit, muon, normuon, orscale, soap, muon-merit,
    soap-merit; torch:NAME, pytorch-optimizer:NAME; or MODULE:CLASS for your own optimizer."""
    lr: float | None = None
    """Peak learning rate. None: the paper's for the GPT-2 model nearest in size; it has adamw, lion, sophiag,
    lamb-uncorrected and merit."""
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
    rate_scale: float | None = None
    """What embeddings, heads and vectors multiply the learning rate by, if the optimizer gives them to AdamW.
    None: its default."""
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
        check_name("optimizer.name", self.name)
        if self.rest is not None:
            check_name("optimizer.rest", self.rest)
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
        for name in ("lr", "rate_scale", "rest_lr", "weight_decay"):
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
        """Return the MODULE:CLASS names that would be imported."""
        named = dict.fromkeys([self.name, *([] if self.rest is None else [self.rest])])
        return [name for name in named if must_be_trusted(name)]

    def overrides_by_pattern(self) -> dict[str, dict[str, Any]]:
        """Return the overrides as ``param_groups`` takes them; if an option is given twice, the last wins."""
        options: dict[str, dict[str, Any]] = {}
        for text in self.overrides:
            pattern, _, setting = text.rpartition(":")
            option, _, value = setting.partition("=")
            if not pattern or not option or not value:
                raise ValueError(
                    f"optimizer.overrides has {text!r}; write PATTERN:OPTION=VALUE, as in "
                    "*embedding*:element_wise=false"
                )
            options.setdefault(pattern, {})[option] = parse_value(value)
            if option == "lr" and not is_number(options[pattern]["lr"], least=0.0):
                raise ValueError(
                    f"optimizer.overrides has {text!r}; a learning rate must be a finite number of at least "
                    "0, as in *norm*:lr=0.01"
                )
        return options

    def rate(self, step: int, steps: int, peak: float) -> float:
        """Return the learning rate of a step, counted from 0, in a run of ``steps`` steps.

        The last step of the warm-up has the peak; a warm-up above 0 has at least one step.

        Example:
            >>> cosine = OptimizerConfig(warmup=0.2)
            >>> [round(cosine.rate(step, 5, 1.0), 3) for step in range(5)]
            [1.0, 0.868, 0.55, 0.232, 0.1]
            >>> wsd = OptimizerConfig(schedule="wsd", warmup=0, decay=0.4)
            >>> [round(wsd.rate(step, 5, 1.0), 3) for step in range(5)]
            [1.0, 1.0, 1.0, 0.55, 0.1]
        """
        warming = max(1, round(self.warmup * steps)) if self.warmup > 0 else 0
        if step < warming:
            return peak * (step + 1) / warming
        # The last step before the decay has the peak; without a warm-up, the first step has it.
        last_at_peak = max(warming - 1, 0)
        if self.schedule == "wsd":
            last_at_peak = max(last_at_peak, steps - 1 - round(self.decay * steps))
        progress = max(0, step - last_at_peak) / max(1, steps - 1 - last_at_peak)
        left = 1 - progress if self.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * progress))
        return peak * (self.final + (1 - self.final) * left)

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


def interval(most: int, steps: int) -> int:
    """The steps between measurements: at most these, and few enough for 20, which make a curve."""
    return max(1, min(most, steps // 20))


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How often to measure. Loss, gradient norm and speed are measured in every step."""

    validation_every: int | None = None
    """Steps between validations; also before the first step and after the last. 0: never. None: twenty times
    in a run, and at least every 250 steps."""
    validation_sequences: int = 256
    """Number of validation sequences, evenly spread over the validation file."""
    few_validation: bool = False
    """Train also where the data has fewer than 64 validation sequences of the model's context."""
    attention_every: int | None = None
    """Steps between measurements of each head's largest logit. 0: never. None: 1 if flex attention provides
    it, otherwise twenty times in a run, and at least every 25 steps."""
    entropy_every: int | None = None
    """Steps between measurements of the attention entropy, which costs more. 0: never. None: twenty times
    in a run, and at least every 100 steps."""
    update_every: int | None = None
    """Steps between statistics of the update (trust-ratio optimizers). 0: never. None: as for the entropy."""
    wandb: str | None = None
    """Also log to this Weights & Biases project."""

    def __post_init__(self) -> None:
        for name in ("validation_every", "attention_every", "entropy_every", "update_every"):
            if (value := getattr(self, name)) is not None:
                check_at_least(f"measure.{name}", value, 0)
        check_at_least("measure.validation_sequences", self.validation_sequences, 1)

    def resolve(self, steps: int) -> Self:
        """Fill in the intervals that depend on the length of the run."""
        often = {"validation_every": 250, "entropy_every": 100, "update_every": 100}
        every: dict[str, Any] = {
            name: interval(most, steps) for name, most in often.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **every)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints; also at the end, unless none is kept, and on SIGTERM, SIGINT or SIGHUP."""

    every_steps: int = 1000
    """Steps between checkpoints. 0: only by the clock."""
    every_minutes: float = 30.0
    """Minutes between checkpoints. 0: only by steps."""
    keep: int = 2
    """How many checkpoints to keep; the oldest are removed first. With 1, there is no fallback if it is
    damaged. 0: one while the run goes on, none once it is over."""

    def __post_init__(self) -> None:
        check_at_least("checkpoint.every_steps", self.every_steps, 0)
        check_at_least("checkpoint.every_minutes", self.every_minutes, 0.0)
        check_at_least("checkpoint.keep", self.keep, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. The same configuration and data yield the same batches on any number of ranks."""

    data: Path
    """Folder with train.bin and val.bin, as `merit prepare` or nanoGPT writes them."""
    model: AnyModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fit_vocab: bool = True
    """Size the model's vocabulary for the data's tokenizer, if the folder names it. The vocabulary of a
    Hugging Face model is not changed and must be large enough."""
    batch: int = 512
    """Sequences per step, over all ranks."""
    micro_batch: int | None = None
    """Most sequences in one forward pass of a rank. None: found by trial on CUDA, 16384 tokens on a CPU."""
    steps: int | None = None
    """Length of the run in steps. Without this and tokens: 20 tokens per parameter (5 in an arena)."""
    tokens: int | None = None
    """Length of the run in tokens, rounded up to whole steps."""
    target: float | None = None
    """End the run once its validation loss is at most this. None: after all steps."""
    seed: int = 0
    """Determines the initial weights and the order of the data."""
    precision: Precision = "auto"
    """bf16: matrix products in bfloat16 by autocast. Weights are always float32. auto: bf16 on CUDA."""
    compile: bool | None = None
    """Use torch.compile. None: on CUDA."""
    parallel: Parallel = "ddp"
    """How ranks share the work under torchrun; ignored for a single process."""
    nonfinite: NonFinite = "stop"
    """What to do if the loss or gradient of a step is not finite: stop the run, or skip the step."""

    def __post_init__(self) -> None:
        check_size("batch", self.batch)
        for name in ("micro_batch", "steps", "tokens"):
            if (value := getattr(self, name)) is not None:
                check_size(name, value, _MOST_TOKENS if name == "tokens" else LARGEST_SIZE)
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps is {self.steps} and tokens is {self.tokens}; give only one of them")
        if self.target is not None and not math.isfinite(self.target):
            raise ValueError(f"target is {self.target}; it must be a finite loss, or None")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be from -2**63 to 2**63 - 1")
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("parallel", self.parallel, get_args(Parallel))
        check_choice("nonfinite", self.nonfinite, get_args(NonFinite))

    def resolve(self, vocab_size: int | None) -> Self:
        """Fill in everything that does not depend on the machine: vocabulary, length, learning rate.

        ``vocab_size`` is that of the data; None if unknown.
        """
        model = self.fitted_model(vocab_size)
        steps = self.steps
        if steps is None:
            tokens = self.tokens or TOKENS_PER_PARAMETER * num_parameters(model)
            steps = math.ceil(tokens / (self.batch * model.context))
        optimizer = self.optimizer.resolve(model)
        measure = self.measure.resolve(steps)
        return dataclasses.replace(
            self, model=model, optimizer=optimizer, measure=measure, steps=steps, tokens=None
        )

    def fitted_model(self, vocab_size: int | None) -> AnyModelConfig:
        """Return the model with the vocabulary of the data, if that is known and wanted."""
        if vocab_size is None or not self.fit_vocab:
            return self.model
        return self.model.with_vocab(vocab_size)

    def differences(self, other: Self) -> dict[str, tuple[object, object]]:
        """Return both values of the fields in which two configurations differ, apart from the data."""
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        pairs = {name: (mine.get(name), theirs.get(name)) for name in {**mine, **theirs} if name != "data"}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as a JSON object."""
        return {**dataclasses.asdict(self), "data": str(self.data)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``to_dict`` returned; an unknown key is an error."""
        try:
            return build(cls, values)
        except ValueError as error:
            raise ValueError(f"in the configuration, {error}") from None

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the configuration, independent of the data folder."""
        values = self.from_dict(self.to_dict()).to_dict()  # 1 becomes 1.0 where a number may be a fraction
        return hashlib.sha256(json.dumps({**values, "data": ""}, sort_keys=True).encode()).hexdigest()
