"""What a training run is, as dataclasses that check themselves and read and write JSON."""

from __future__ import annotations

import dataclasses
import difflib
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
from merit_lab.train.options import parse_options
from merit_lab.train.own_optimizer import check_name, is_own, must_be_trusted
from merit_lab.train.schedule import learning_rate
from merit_optim.settings import SETTINGS

Precision = Literal["auto", "bf16", "float32"]
Parallel = Literal["ddp", "fsdp2"]
NonFinite = Literal["stop", "skip"]
Schedule = Literal["cosine", "wsd"]
Part = Literal["clip", "weight-bound", "element-wise"]

_T = TypeVar("_T")

_LOOKS = 20  # a curve of so many points can be read
_MOST_TOKENS = 2**62  # as the rows of all steps, they are counted in 64 bits

TOKENS_PER_PARAMETER = 20  # where no length is given: about compute-optimal (Hoffmann et al., 2022)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer; what is None has the MERIT paper's value."""

    name: str = "merit"
    """adamw, lion, sophiag, lamb, maxlamb, merit, muon, normuon, orscale, soap, muon-merit,
    soap-merit; torch:NAME, pytorch-optimizer:NAME; or MODULE:CLASS, an optimizer of your own."""
    lr: float | None = None
    """Peak learning rate. None: the paper's for the GPT-2 model nearest in size."""
    betas: tuple[float, float] | None = None
    """Decay of the two moments."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors have none."""
    max_grad_norm: float | None = 1.0
    """Gradients with a larger norm are scaled down to it; None: never."""
    schedule: Schedule = "cosine"
    """How the learning rate falls: cosine, from the warm-up on; wsd (warm-up, stable, decay), by a straight
    line in the last steps."""
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises to its peak."""
    decay: float = 0.2
    """With wsd, the share of the steps in which it falls."""
    final: float = 0.1
    """Share of the peak that it ends at."""
    without: tuple[Part, ...] = ()
    """Parts of MERIT to leave out, as in the paper's ablations."""
    options: tuple[str, ...] = ()
    """Other arguments of the optimizer, as OPTION=VALUE: momentum=0.9, betas=0.9,0.99,0.999."""
    overrides: tuple[str, ...] = ()
    """Options of some parameters alone, as PATTERN:OPTION=VALUE: "*embedding*:element_wise=false"."""
    rest: str | None = None
    """A second optimizer for all but hidden matrices, by a name as above. None: the first has all."""
    rest_lr: float | None = None
    """Its peak learning rate; the schedule is the same. None: as for the first."""
    rest_options: tuple[str, ...] = ()
    """Its other arguments, as OPTION=VALUE."""

    def __post_init__(self) -> None:
        _check_optimizer_name("optimizer.name", self.name)
        if self.rest is not None:
            _check_optimizer_name("optimizer.rest", self.rest)
        elif self.rest_lr is not None or self.rest_options:
            raise ValueError(
                "optimizer.rest_lr and optimizer.rest_options are for a second optimizer, and there is none; "
                "name it with --optimizer.rest, as in --optimizer.rest adamw"
            )
        for part in self.without:
            _one_of("optimizer.without", part, get_args(Part))
        if self.without and self.name != "merit":
            raise ValueError(
                f"optimizer.without is {', '.join(self.without)}, but {self.name} has no such parts; it is "
                "for merit alone"
            )
        if "betas" in self.options_by_name() and self.betas is not None:
            raise ValueError(
                "optimizer.options has betas, and optimizer.betas is given too; give one of the two"
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
                raise ValueError(f"optimizer.{name} is {getattr(self, name)!r}; it is a share, from 0 to 1")

    def options_by_name(self) -> dict[str, Any]:
        """The other arguments of the optimizer."""
        return parse_options(self.options, "optimizer.options")

    def rest_options_by_name(self) -> dict[str, Any]:
        """Those of the second."""
        return parse_options(self.rest_options, "optimizer.rest_options")

    def modules_of_others(self) -> list[str]:
        """What it names as MODULE:CLASS, and so has imported: optimizers, and classes among their options."""
        options = [*self.options_by_name().values(), *self.rest_options_by_name().values()]
        named = [own for own in (self.name, self.rest, *options) if isinstance(own, str)]
        return [own for own in dict.fromkeys(named) if must_be_trusted(own)]

    def overrides_by_pattern(self) -> dict[str, dict[str, Any]]:
        """The overrides as ``param_groups`` takes them; of an option given twice, the later wins."""
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
            if option == "lr":
                raise ValueError(
                    f"optimizer.overrides has {text!r}, but the schedule sets the learning rate of every "
                    "parameter; change optimizer.lr"
                )
        return options

    def rate(self, step: int, steps: int, peak: float) -> float:
        """The learning rate of a step, counted from 0, in a run of so many; ``peak`` is the highest."""
        return learning_rate(
            step,
            steps=steps,
            peak=peak,
            warmup=self.warmup,
            final=self.final,
            decay=self.decay if self.schedule == "wsd" else None,
        )

    def begins_to_fall(self, steps: int) -> int | None:
        """With wsd, the number of steps before the learning rate falls in a run of so many; else None."""
        return steps - round(self.decay * steps) if self.schedule == "wsd" else None

    def resolve(self, model: AnyModelConfig) -> Self:
        """With learning rates, for a model."""
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
    """What is measured, and how often. Loss, gradient norm and speed are, in every step."""

    validation_every: int | None = None
    """Steps between validations; also before the first step and after the last. 0: never. None: twenty times
    in a run, and at least every 250 steps."""
    validation_sequences: int = 256
    """Sequences of the validation file that are used, evenly spread over it."""
    attention_every: int | None = None
    """Steps between observations of each head's largest logit. 0: never. None: 1 where flex has it, else
    twenty times in a run, and at least every 25 steps."""
    entropy_every: int | None = None
    """Steps between observations of the attention entropy too, which costs more. 0: never. None: twenty times
    in a run, and at least every 100 steps."""
    update_every: int | None = None
    """Steps between statistics of the update (trust-ratio optimizers). 0: never. None: as for the entropy."""
    wandb: str | None = None
    """Project at Weights & Biases to write to as well."""

    def __post_init__(self) -> None:
        for name in ("validation_every", "attention_every", "entropy_every", "update_every"):
            _at_least(f"measure.{name}", getattr(self, name), 0)
        _at_least("measure.validation_sequences", self.validation_sequences, 1)

    def resolve(self, steps: int) -> Self:
        """With what follows from the length of the run."""
        often = {"validation_every": 250, "entropy_every": 100, "update_every": 100}
        every: dict[str, Any] = {
            name: max(1, min(most, steps // _LOOKS))
            for name, most in often.items()
            if getattr(self, name) is None
        }
        return dataclasses.replace(self, **every)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written. There is always one at the end and one on SIGTERM or SIGINT."""

    every_steps: int = 1000
    """Steps between checkpoints. 0: by the clock alone."""
    every_minutes: float = 30.0
    """Minutes between checkpoints. 0: by steps alone."""
    keep: int = 2
    """How many are kept; the oldest go first. With one, nothing is left if it is damaged."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every_steps", self.every_steps, 0)
        _at_least("checkpoint.every_minutes", self.every_minutes, 0.0)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. The same configuration and data give the same batches on any number of ranks."""

    data: Path
    """Folder with train.bin and val.bin, as `merit prepare` or nanoGPT writes them."""
    model: AnyModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fit_vocab: bool = True
    """Size the model's vocabulary for the data's tokenizer, where the folder names it; that of a Hugging Face
    model stays as it is, and must be large enough."""
    batch: int = 512
    """Sequences in a step, over all ranks together."""
    micro_batch: int | None = None
    """Most sequences in one forward pass of a rank. None: found by trying on CUDA, 16384 tokens on a CPU."""
    steps: int | None = None
    """Length of the run in steps. Neither this nor tokens: 20 tokens for each parameter."""
    tokens: int | None = None
    """Length of the run in tokens, rounded up to whole steps."""
    seed: int = 0
    """Decides the first weights and the order of the data."""
    precision: Precision = "auto"
    """bf16: matrix products in bfloat16 by autocast. Weights are float32 always. auto: bf16 on CUDA."""
    compile: bool | None = None
    """Use torch.compile. None: on CUDA."""
    parallel: Parallel = "ddp"
    """How ranks share the work under torchrun; one process alone needs neither."""
    nonfinite: NonFinite = "stop"
    """What to do about a step whose loss or gradient is not finite: end the run, or leave the step out."""

    def __post_init__(self) -> None:
        check_size("batch", self.batch)
        for name in ("micro_batch", "steps", "tokens"):
            if (value := getattr(self, name)) is not None:
                check_size(name, value, _MOST_TOKENS if name == "tokens" else LARGEST_SIZE)
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps is {self.steps} and tokens is {self.tokens}; give one of the two")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; it must be a whole number of at most 64 bits")
        _one_of("precision", self.precision, get_args(Precision))
        _one_of("parallel", self.parallel, get_args(Parallel))
        _one_of("nonfinite", self.nonfinite, get_args(NonFinite))

    def resolve(self, vocab_size: int | None) -> Self:
        """With everything decided that can be before the machine is known: vocabulary, length, rate.

        ``vocab_size`` is the data's, None where it is not known.
        """
        model = self.model
        if vocab_size is not None and self.fit_vocab:
            model = model.with_vocab(vocab_size)
        steps = self.steps
        if steps is None:
            tokens = self.tokens or TOKENS_PER_PARAMETER * num_parameters(model)
            steps = math.ceil(tokens / (self.batch * model.context))
        optimizer = self.optimizer.resolve(model)
        measure = self.measure.resolve(steps)
        return dataclasses.replace(
            self, model=model, optimizer=optimizer, measure=measure, steps=steps, tokens=None
        )

    def extended(self, steps: int) -> Self:
        """A longer run with the same warm-up, for one that is resolved."""
        assert self.steps is not None
        if steps <= self.steps:
            raise ValueError(f"the run has {self.steps} steps, and {steps} are asked for; ask for more")
        warming = max(1, round(self.optimizer.warmup * self.steps)) if self.optimizer.warmup > 0 else 0
        optimizer = dataclasses.replace(self.optimizer, warmup=warming / steps)
        return dataclasses.replace(self, optimizer=optimizer, steps=steps)

    def steps_in_common(self, longer: Self) -> int:
        """For how many steps the learning rate of a longer run is the same."""
        pairs = zip(self._shares_of_peak(), longer._shares_of_peak(), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _shares_of_peak(self) -> Iterator[float]:
        assert self.steps is not None
        return (self.optimizer.rate(step, self.steps, peak=1.0) for step in range(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values = dataclasses.asdict(self)
        values["data"] = str(self.data)
        # Records from before there were these fields are compared with this.
        for name in ("rest", "rest_lr"):
            if values["optimizer"][name] is None:
                del values["optimizer"][name]
        if self.optimizer.schedule == "cosine":
            del values["optimizer"]["schedule"], values["optimizer"]["decay"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what ``to_dict`` gave; an unknown key is an error."""
        return _build(cls, values, "")

    @property
    def fingerprint(self) -> str:
        """What identifies the run that is asked for, wherever its data lie.

        What has its default value is no part of it: a version with one more field knows old runs again.
        """
        values = {**_unusual(self), "data": ""}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _unusual(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that have not their default value, nested ones too; as JSON has them."""
    values: dict[str, Any] = {}
    for own in dataclasses.fields(config):
        value = getattr(config, own.name)
        if dataclasses.is_dataclass(value):
            values[own.name] = _unusual(value)
        elif value != own.default:
            values[own.name] = str(value) if isinstance(value, Path) else value
    return values


def _build(kind: type[_T], values: dict[str, Any], prefix: str) -> _T:
    """A dataclass from a dictionary of its fields, nested ones too."""
    hints = _hints(cast(Any, kind))
    for key in values:
        if key not in hints:
            nearest = difflib.get_close_matches(key, hints, n=1)
            hint = f" (the nearest is {prefix}{nearest[0]})" if nearest else ""
            raise ValueError(
                f"the configuration has {prefix}{key}, which this version of merit-optim does not know"
                f"{hint}; it is from another version, or was edited. Use the version that wrote it, or "
                "start a new run."
            )
    for own in dataclasses.fields(cast(Any, kind)):
        if own.name not in values and own.default is own.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"the configuration has no {prefix}{own.name}; put back the file that the run wrote"
            )
    built = {}
    for key, value in values.items():
        if not fits(value, hints[key]):
            raise ValueError(
                f"the configuration has {reprlib.repr(value)} as {prefix}{key}; it must be "
                f"{in_words(hints[key])}. Put back the file that the run wrote, or start a new run."
            )
        if members := dataclasses_of(hints[key]):
            # Of several the one that has such fields; the first where none has, which says so.
            fitting = (
                own for own in members if set(value) <= {field.name for field in dataclasses.fields(own)}
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
    """The dataclasses that a type is, or is one of."""
    return [own for own in get_args(hint) or [hint] if dataclasses.is_dataclass(own)]


def _check_optimizer_name(field: str, name: str) -> None:
    if is_own(name):
        check_name(field, name)
    else:
        others = "torch:NAME, pytorch-optimizer:NAME", "MODULE:CLASS for one of your own"
        _one_of(field, name, tuple(SETTINGS), *others)


def _paper_rate(name: str, model: AnyModelConfig, way_out: str) -> float:
    """The peak learning rate that the paper has for the GPT-2 nearest in size."""
    rates = {} if is_own(name) else SETTINGS[name].learning_rates
    if not rates:
        raise ValueError(f"the paper gives no learning rate for {name}; pass {way_out}")
    size = math.log(num_parameters(model))
    nearest = min(rates, key=lambda preset: abs(math.log(num_parameters(PRESETS[preset])) - size))
    return rates[nearest]


def _one_of(name: str, value: str, allowed: tuple[str, ...], *others: str) -> None:
    if value not in allowed:
        nearest = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ";"
        known = ", or ".join([", ".join(allowed), *others])
        raise ValueError(f"{name} is {value!r}{hint} it must be one of {known}")


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is None:
        return
    kind: type | tuple[type, ...] = int if isinstance(least, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
        word = "whole number" if isinstance(least, int) else "finite number"
        raise ValueError(f"{name} is {value!r}; it must be a {word} that is at least {least}")
