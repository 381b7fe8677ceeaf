"""What is trained at a scale: models, batches, lengths, learning rates; and the runs of these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from merit_lab.models import ModelConfig
from merit_lab.report.gather import display_name
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.config import MeritPart

# Runs of these are looked into most, so they keep checkpoints from on the way.
WATCHED = ("adamw", "lamb", "merit")
_PLACE_OF_DATA = Path()  # where the data lie is known to the command alone


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, a batch and a length, with each optimizer's learning rate for them."""

    name: str
    """As the tables have it, for example "GPT-2 small, batch 1K"."""
    model: ModelConfig
    batch: int
    tokens: int
    rates: Mapping[str, float]
    paper: str = ""
    """Which of the paper's models it stands for: small, medium or large."""

    def with_batch(self, batch: int) -> Setting:
        """The same number of tokens in other batches, learning rates by the square root of the batch.

        The square root is what Adam's noise asks for (Malladi et al., 2022); the paper gives one learning
        rate for each model and says nothing of other batches.
        """
        factor = math.sqrt(batch / self.batch)
        rates = {name: float(f"{rate * factor:.3g}") for name, rate in self.rates.items()}
        name = f"{self.model_name}, batch {batch}"
        return dataclasses.replace(self, name=name, batch=batch, rates=rates)

    @property
    def model_name(self) -> str:
        """The name without the batch."""
        return self.name.partition(",")[0]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A run that an entry needs, and where the entry shows it."""

    config: TrainConfig
    series: str
    panel: str = ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """All settings of one scale."""

    name: str
    summary: str
    gpt2: tuple[Setting, ...]
    llama: tuple[Setting, ...]
    batches: tuple[int, ...]
    """Of figure 1, for the first of ``gpt2``; the second has the same multiples of its own batch."""
    small_batch: int
    """Of figure 11, with the setting that is ``observed``."""
    references: tuple[Setting, ...]
    """AdamW with small batches, one for each of the first of ``gpt2``, with as many tokens."""
    horizon: Setting
    """With several times the tokens of the first of ``gpt2``."""
    doubled: tuple[Setting, ...]
    """With twice the batch, one for each of the first of ``gpt2``: as many tokens, rates of their own."""
    long: tuple[Setting, ...]
    """Of table 1: pairs of a small batch for AdamW and a large one for MERIT, one after the other."""
    shapes: tuple[Setting, ...]
    """Of the comparison of widths: as many parameters, in few wide layers and in many narrow ones."""
    shape_batches: tuple[int, ...]
    seeds: int = 3
    grid_seeds: int = 1
    """Seeds of the entries with many runs."""
    num_looks: int = 20
    """Measurements of validation loss, attention and updates in a run."""
    num_checkpoints: int = 5
    validation_sequences: int = 256
    curvature_sequences: int = 64
    """Of figure 7: sequences that the Hessian is of."""
    curvature_probes: int = 32
    """Random vectors for the trace; as many Lanczos steps for the density."""
    evaluation_limit: int | None = None
    """Items of each evaluation set; None for all."""
    tokenizer: str | None = None
    """For a corpus that every machine has; None where that is not enough, and data must be given."""
    is_large: bool = False
    """Whether one asks before starting."""

    @property
    def makes_data(self) -> bool:
        """Whether it needs no data given."""
        return self.tokenizer is not None

    @property
    def observed(self) -> Setting:
        """Where the paper looks into attention: GPT-2 medium, or the largest below that."""
        return self.gpt2[min(1, len(self.gpt2) - 1)]

    def trial(
        self,
        setting: Setting,
        optimizer: str,
        seed: int,
        *,
        lr: float | None = None,
        without: tuple[MeritPart, ...] = (),
        overrides: tuple[str, ...] = (),
        warmup: float = OptimizerConfig.warmup,
        qk_norm: bool = False,
        series: str | None = None,
        panel: str | None = None,
    ) -> Shown:
        """One run of a setting; under the optimizer's name and the setting's unless others are given."""
        steps = math.ceil(setting.tokens / (setting.batch * setting.model.context))
        every = max(1, steps // self.num_looks)
        is_watched = optimizer in WATCHED and not without and not qk_norm
        num_checkpoints = self.num_checkpoints if is_watched else 1
        config = TrainConfig(
            data=_PLACE_OF_DATA,
            model=dataclasses.replace(setting.model, qk_norm=qk_norm),
            optimizer=OptimizerConfig(
                name=optimizer,
                lr=lr or setting.rates[optimizer],
                warmup=warmup,
                without=without,
                overrides=overrides,
            ),
            measure=MeasureConfig(
                validation_every=every,
                validation_sequences=self.validation_sequences,
                attention_every=every,
                entropy_every=0,
                update_every=every,
            ),
            checkpoint=CheckpointConfig(
                every_steps=math.ceil(steps / num_checkpoints) if num_checkpoints > 1 else 0,
                keep=max(2, num_checkpoints),
            ),
            batch=setting.batch,
            steps=steps,
            seed=seed,
        )
        return Shown(
            config=config,
            series=display_name(optimizer) if series is None else series,
            panel=setting.name if panel is None else panel,
        )
