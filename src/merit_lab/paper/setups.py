"""Scales and their setups: model, batch, tokens and learning rates, and the trials made from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.models import ModelConfig
from merit_lab.results.gather import display_name
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_config import MeritPart

# Most entries analyse runs of these, so they keep intermediate checkpoints.
WATCHED = ("adamw", "lamb", "merit")
_DATA_PLACEHOLDER = Path()  # `plan` fills in the data folder


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, a batch size and a number of tokens, with a learning rate for each optimizer."""

    name: str
    """As shown in tables, for example "GPT-2 small, batch 1K"."""
    model: ModelConfig
    batch: int
    tokens: int
    rates: Mapping[str, float]
    paper: str = ""
    """The size of the paper's model that it repeats, for example "small" or "130M"; empty if none."""

    def with_batch(self, batch: int) -> Setup:
        """The same number of tokens with another batch size, learning rates scaled by its square root.

        Square-root scaling suits Adam's gradient noise (Malladi et al., 2022). The paper gives one learning
        rate for each model, and none for other batch sizes.
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
class EntryTrial:
    """A trial that an entry needs, with the panel and the series it is shown in."""

    config: TrainConfig
    series: str
    panel: str = ""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """All setups of one scale."""

    name: str
    summary: str
    gpt2: tuple[Setup, ...]
    llama: tuple[Setup, ...]
    batches: tuple[int, ...]
    """Batch sizes of figure 1 for the first of ``gpt2``; the second uses the same multiples of its batch."""
    small_batch: int
    """Batch size of figure 11, for the ``observed`` setup."""
    references: tuple[Setup, ...]
    """AdamW with small batches and the same number of tokens, one for each of the first of ``gpt2``."""
    horizon: Setup
    """The first of ``gpt2`` with several times the tokens."""
    doubled: tuple[Setup, ...]
    """Twice the batch, the same tokens and separate rates, one for each of the first of ``gpt2``."""
    long: tuple[Setup, ...]
    """Setups of table 1, in pairs: a small batch for AdamW, then a large one for MERIT."""
    shapes: tuple[Setup, ...]
    """Setups of the width comparison: equal parameter counts in few wide layers and in many narrow ones."""
    shape_batches: tuple[int, ...]
    seeds: int = 3
    grid_seeds: int = 1
    """Seeds of entries with many runs."""
    num_measurements: int = 20
    """How often a run measures validation loss, attention and updates."""
    num_checkpoints: int = 5
    validation_sequences: int = 256
    curvature_sequences: int = 64
    """Sequences that the Hessian of figure 7 is computed on."""
    curvature_probes: int = 32
    """Random vectors for the trace; the density takes twice as many Lanczos steps."""
    evaluation_limit: int | None = None
    """Items of each evaluation set; None for all."""
    tokenizer: str | None = None
    """Tokenizer for the text that every machine has; None if that is too little and --data is required."""
    is_large: bool = False
    """Whether to ask before starting."""

    @property
    def makes_data(self) -> bool:
        """Whether it can run without --data."""
        return self.tokenizer is not None

    @property
    def observed(self) -> Setup:
        """The setup of the attention figures: the second of ``gpt2`` (GPT-2 medium), or the only one."""
        return self.gpt2[min(1, len(self.gpt2) - 1)]

    def trials(self, setups: Iterable[Setup], optimizers: Sequence[str], seeds: int) -> list[EntryTrial]:
        """Trials of every optimizer in every setup, seed by seed."""
        return [
            self.trial(setup, optimizer, seed)
            for seed in range(seeds)
            for setup in setups
            for optimizer in optimizers
        ]

    def trial(
        self,
        setup: Setup,
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
    ) -> EntryTrial:
        """One trial of a setup; ``series`` and ``panel`` default to the names of optimizer and setup."""
        steps = math.ceil(setup.tokens / (setup.batch * setup.model.context))
        every = max(1, steps // self.num_measurements)
        is_watched = optimizer in WATCHED and not without and not qk_norm
        num_checkpoints = self.num_checkpoints if is_watched else 1
        config = TrainConfig(
            data=_DATA_PLACEHOLDER,
            model=dataclasses.replace(setup.model, qk_norm=qk_norm),
            optimizer=OptimizerConfig(
                name=optimizer,
                lr=lr or setup.rates[optimizer],
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
            batch=setup.batch,
            steps=steps,
            seed=seed,
        )
        return EntryTrial(
            config=config,
            series=display_name(optimizer) if series is None else series,
            panel=setup.name if panel is None else panel,
        )
