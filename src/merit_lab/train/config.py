"""The configuration of a training run: dataclasses that validate themselves and convert to and from JSON."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args, get_type_hints

from merit_lab.models.config import LARGEST_SIZE, PRESETS, ModelConfig, check_size
from merit_lab.models.names import AnyModelConfig, num_parameters
from merit_lab.record.json_types import fits, in_words
from merit_lab.train.optimizer_names import check_name, is_external, must_be_trusted
from merit_lab.train.optimizer_options import default_of, parse_options
from merit_lab.train.schedule import learning_rate, warmup_steps
from merit_optim.settings import SETTINGS
from merit_optim.spelling import did_you_mean, nearest

Precision = Literal["auto", "bf16", "float32"]
Parallel = Literal["ddp", "fsdp2"]
NonFinite = Literal["stop", "skip"]
Schedule = Literal["cosine", "wsd"]
MeritPart = Literal["clip", "weight-bound", "element-wise"]

_T = TypeVar("_T")

_MOST_TOKENS = 2**62  # tokens, and rows over all steps, are counted in 64 bits

TOKENS_PER_PARAMETER = 20  # the default length: about compute-optimal (Hoffmann et al., 2022)


def interval(most: int, steps: int) -> int:
    """The steps between measurements: at most these, and few enough for 20, which make a curve."""
    return max(1, min(most, steps // 20))


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
            _one_of("optimizer.without", part, get_args(MeritPart))
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
        _at_least("optimizer.lr", self.lr, 0.0)
        _at_least("optimizer.rest_lr", self.rest_lr, 0.0)
        _at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(
                f"optimizer.max_grad_norm is {self.max_grad_norm!r}; it must be above 0, or None"
            )
        _one_of("optimizer.schedule", self.schedule, get_args(Schedule))
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
                options.setdefault(pattern, {})[option] = json.loads(value)
            except ValueError:
                pattern = ""
            if not pattern or not option:
                raise ValueError(
                    f"optimizer.overrides has {text!r}; write PATTERN:OPTION=VALUE with the value as JSON, "
                    "as in *embedding*:element_wise=false"
                )
            if option == "lr" and not _is_number(options[pattern]["lr"], at_least=0.0):
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

    def begins_to_fall(self, steps: int) -> int | None:
        """Return the number of steps before the learning rate decays, with wsd; otherwise None."""
        return steps - round(self.decay * steps) if self.schedule == "wsd" else None

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


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How often to measure. Loss, gradient norm and speed are measured in every step."""

    validation_every: int | None = None
    """Steps between validations; also before the first step and after the last. 0: never. None: twenty times
    in a run, and at least every 250 steps."""
    validation_sequences: int = 256
    """Number of validation sequences, evenly spread over the validation file."""
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
            _at_least(f"measure.{name}", getattr(self, name), 0)
        _at_least("measure.validation_sequences", self.validation_sequences, 1)

    def resolve(self, steps: int) -> Self:
        """Fill in the intervals that depend on the length of the run."""
        often = {"validation_every": 250, "entropy_every": 100, "update_every": 100}
        every: dict[str, Any] = {
            name: interval(most, steps) for name, most in often.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **every)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints. There is always one at the end and one on SIGTERM, SIGINT or SIGHUP."""

    every_steps: int = 1000
    """Steps between checkpoints. 0: only by the clock."""
    every_minutes: float = 30.0
    """Minutes between checkpoints. 0: only by steps."""
    keep: int = 2
    """How many checkpoints to keep; the oldest are removed first. With 1, there is no fallback if it is
    damaged."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every_steps", self.every_steps, 0)
        _at_least("checkpoint.every_minutes", self.every_minutes, 0.0)
        _at_least("checkpoint.keep", self.keep, 1)


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
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be an integer of at most 64 bits")
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("parallel", self.parallel, get_args(Parallel))
        _one_of("nonfinite", self.nonfinite, get_args(NonFinite))

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

    def extended(self, steps: int) -> Self:
        """Return a longer run with the same warm-up; ``self`` must be resolved."""
        assert self.steps is not None
        if steps <= self.steps:
            raise ValueError(f"steps is {steps}, but the run already has {self.steps}; give a larger number")
        warming = warmup_steps(self.optimizer.warmup, self.steps)
        optimizer = dataclasses.replace(self.optimizer, warmup=warming / steps)
        return dataclasses.replace(self, optimizer=optimizer, steps=steps)

    def steps_in_common(self, longer: Self) -> int:
        """Return the number of steps in which a longer run has the same learning rate."""
        pairs = zip(self._shares_of_peak(), longer._shares_of_peak(), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _shares_of_peak(self) -> Iterator[float]:
        assert self.steps is not None
        return (self.optimizer.rate(step, self.steps, peak=1.0) for step in range(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        values = dataclasses.asdict(self)
        values["data"] = str(self.data)
        # Older records without these fields are compared with this.
        for name in ("rest", "rest_lr"):
            if values["optimizer"][name] is None:
                del values["optimizer"][name]
        if self.optimizer.schedule == "cosine":
            del values["optimizer"]["schedule"], values["optimizer"]["decay"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``to_dict`` returned; an unknown key is an error."""
        return _build(cls, values, "")

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the configuration, independent of the data folder.

        Fields with default values do not enter it, so a version with more fields still recognizes old runs.
        """
        values = {**_unusual(self), "data": ""}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _unusual(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass without their default value, including nested ones, as JSON values."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(value):
            values[spec.name] = _unusual(value)
        elif value != spec.default:
            values[spec.name] = str(value) if isinstance(value, Path) else value
    return values


def _build(kind: type[_T], values: dict[str, Any], prefix: str) -> _T:
    """Build a dataclass from a dictionary of its fields, including nested ones."""
    hints = _hints(cast(Any, kind))
    for key in values:
        if key not in hints:
            similar = nearest(key, hints)
            hint = f" (the nearest is {prefix}{similar[0]})" if similar else ""
            raise ValueError(
                f"the configuration has {prefix}{key}, which this version of merit-optim does not know"
                f"{hint}; another version wrote it, or it was edited. Use the version that wrote it, or "
                "start a new run."
            )
    for spec in dataclasses.fields(cast(Any, kind)):
        if spec.name not in values and spec.default is spec.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"the configuration has no {prefix}{spec.name}; restore the file that the run wrote"
            )
    built = {}
    for key, value in values.items():
        if not fits(value, hints[key]):
            raise ValueError(
                f"the configuration has {reprlib.repr(value)} as {prefix}{key}; it must be "
                f"{in_words(hints[key])}. Restore the file that the run wrote, or start a new run."
            )
        if members := dataclasses_of(hints[key]):
            # Of several, the one with these fields; if there is none, the first reports the unknown field.
            fitting = (
                cls for cls in members if set(value) <= {field.name for field in dataclasses.fields(cls)}
            )
            value = _build(next(fitting, members[0]), value, f"{prefix}{key}.")
        elif hints[key] is Path:
            value = Path(value)
        elif isinstance(value, list):
            value = tuple(value)
        built[key] = value
    return kind(**built)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields. Evaluating them takes longer than all else of ``_build``."""
    return get_type_hints(kind)


def dataclasses_of(hint: Any) -> list[Any]:
    """Return the dataclasses in a type hint, which may be a union."""
    return [cls for cls in get_args(hint) or [hint] if dataclasses.is_dataclass(cls)]


def _check_optimizer_name(field: str, name: str) -> None:
    if is_external(name):
        check_name(field, name)
    else:
        others = "torch:NAME, pytorch-optimizer:NAME", "MODULE:CLASS for your own"
        _one_of(field, name, tuple(SETTINGS), *others)


def _paper_rate(name: str, model: AnyModelConfig, way_out: str) -> float:
    """Return the paper's peak learning rate for the GPT-2 nearest in size."""
    rates = {} if is_external(name) else SETTINGS[name].learning_rates
    if not rates:
        of_class = "" if is_external(name) else f" (the default of its class is {default_of(name, 'lr'):g})"
        raise ValueError(f"the paper gives no learning rate for {name}; pass {way_out}{of_class}")
    size = math.log(num_parameters(model))
    nearest_preset = min(rates, key=lambda preset: abs(math.log(num_parameters(PRESETS[preset])) - size))
    return rates[nearest_preset]


def _one_of(name: str, value: str, allowed: tuple[str, ...], *others: str) -> None:
    if value not in allowed:
        hint = did_you_mean(value, allowed, otherwise=";")
        known = ", or ".join([", ".join(allowed), *others])
        raise ValueError(f"{name} is {value!r}{hint} it must be one of {known}")


def _is_number(value: object, at_least: float) -> bool:
    """Whether a value is finite and large enough, and an integer if ``at_least`` is one."""
    if isinstance(value, bool) or not isinstance(value, int if isinstance(at_least, int) else int | float):
        return False
    return at_least <= value < math.inf


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is None:
        return
    if not _is_number(value, least):
        required = "an integer" if isinstance(least, int) else "a finite number"
        raise ValueError(f"{name} is {value!r}; it must be {required} of at least {least}")
