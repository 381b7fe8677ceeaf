"""The configuration of a training run: dataclasses that validate themselves and convert to and from JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

from merit_lab.checks import LARGEST_SIZE, check_at_least, check_choice, check_size
from merit_lab.json_values import build
from merit_lab.models.config import ModelConfig
from merit_lab.models.names import num_parameters
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.runs.settings import flatten
from merit_lab.train.optimizer_config import OptimizerConfig

Precision = Literal["auto", "bf16", "float32"]
Parallel = Literal["ddp", "fsdp2"]
NonFinite = Literal["stop", "skip"]

_MOST_TOKENS = 2**62  # tokens, and rows over all steps, are counted in 64 bits

TOKENS_PER_PARAMETER = 20  # the default length: about compute-optimal (Hoffmann et al., 2022)


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
