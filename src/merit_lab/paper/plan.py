"""Which runs an entry needs: a query over a scale, and the runs that it plans.

A run is known by its settings and its data, whatever its folder is called. So entries share runs, and kept
runs are found again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from merit_lab.data import Dataset
from merit_lab.models import ModelConfig
from merit_lab.paper.scales import Scale, Setup
from merit_lab.results.names import display_name, short_name
from merit_lab.runs.settings import flatten
from merit_lab.study.fields import with_values
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig

WATCHED = ("adamw", "lamb-uncorrected", "merit")
"""Most entries are about these, so their runs keep checkpoints on the way."""
WARMUP = 0.02  # the paper's
# Settings that decide what is trained. How often a run is measured or saved is not one of them.
_DECISIVE = ("model.", "optimizer.", "batch", "steps", "seed", "precision", "measure.validation_sequences")


class Corpus(NamedTuple):
    """The data of runs, known even when their files are gone."""

    folder: Path = Path()
    vocab_size: int | None = None
    fingerprint: str = ""
    """Empty while the data are not known: no run is of these."""

    @classmethod
    def of(cls, dataset: Dataset) -> Corpus:
        """Those of a folder of token files."""
        return cls(dataset.folder, dataset.vocab_size, dataset.fingerprint)


@dataclass(frozen=True)
class Runs:
    """A query: setups x optimizers x factors of their learning rates x seeds, with some settings changed."""

    setups: str
    """By their name in ``Scale.setups``."""
    optimizers: Sequence[str]
    factors: Sequence[float] = (1.0,)
    """Of the setup's learning rate."""
    rate_of: str = ""
    """The optimizer whose learning rate it is, if not its own."""
    seeds: int | None = None
    """At most so many."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Other settings, by their dotted names."""
    overrides: str = ""
    """The optimizer's, a format of the model: "*query*:rows={model.head_width}"."""
    series: str = "{name}"
    """The name of the series, a format of the optimizer's ``name``."""

    def planned(self, scale: Scale, seeds: int, corpus: Corpus) -> Iterator[Planned]:
        """The runs at a scale, seed by seed."""
        some_seeds, setups = range(min(seeds, self.seeds or seeds)), scale.setups[self.setups]
        for seed, setup, optimizer, factor in itertools.product(
            some_seeds, setups, self.optimizers, self.factors
        ):
            config = self._config(scale, setup, optimizer, factor)
            changes = {"data": str(corpus.folder), "seed": seed, **self.changes}
            config = with_values(config, changes).resolve(corpus.vocab_size)
            yield Planned(
                config=config,
                identity=identify(flatten(config.to_dict()), corpus.fingerprint),
                panel=setup.name,
                model=setup.size,
                part=self.setups,
                series=self.series.format(name=display_name(optimizer)),
                factor=factor,
            )

    def _config(self, scale: Scale, setup: Setup, optimizer: str, factor: float) -> TrainConfig:
        steps = math.ceil(setup.tokens / (setup.batch * setup.model.context))
        every = max(1, steps // scale.num_measurements)
        checkpoints = scale.num_checkpoints if optimizer in WATCHED and not self.changes else 1
        return TrainConfig(
            data=Path(),
            model=setup.model,
            optimizer=OptimizerConfig(
                name=optimizer,
                lr=float(f"{factor * setup.rates[self.rate_of or optimizer]:.3g}"),
                warmup=WARMUP,
                overrides=(self.overrides.format(model=setup.model),) if self.overrides else (),
            ),
            measure=MeasureConfig(
                validation_every=every,
                validation_sequences=scale.validation_sequences,
                attention_every=every,
                entropy_every=0,
                update_every=every,
            ),
            checkpoint=CheckpointConfig(
                every_steps=math.ceil(steps / checkpoints) if checkpoints > 1 else 0,
                keep=max(2, checkpoints),
            ),
            batch=setup.batch,
            steps=steps,
        )


class Planned(NamedTuple):
    """A run that an entry needs, and where the entry shows it."""

    config: TrainConfig
    identity: str
    panel: str
    """The name of its setup."""
    model: str
    """The size of its setup."""
    part: str
    """What its query calls its setups."""
    series: str
    factor: float

    @property
    def folder(self) -> str:
        """The name of its directory: what its optimizer and model are, and a hash of all settings."""
        model, optimizer = self.config.model, self.config.optimizer
        assert isinstance(model, ModelConfig), "scales have the lab's own models"
        return (
            f"{model.family}-{model.layers}x{model.width}-{short_name(optimizer.name)}-lr{optimizer.lr:g}-"
            f"batch{self.config.batch}-seed{self.config.seed}-{self.identity[:8]}"
        )


def plan(queries: Iterable[Runs], scale: Scale, seeds: int, corpus: Corpus = Corpus()) -> list[Planned]:  # noqa: B008  # a tuple
    """The runs of several queries, each once; all those of a seed before those of the next."""
    planned = [one for query in queries for one in query.planned(scale, seeds, corpus)]
    unique = {(one.identity, one.panel, one.series): one for one in planned}
    return sorted(unique.values(), key=lambda one: one.config.seed)


def identify(settings: Mapping[str, object], fingerprint: str | None) -> str:
    """What identifies a run: a hash of its settings and its data.

    Settings that have their default do not count, so that records from before a setting are found.
    """
    usual = _usual()
    values = {
        name: text
        for name, value in settings.items()
        if name.startswith(_DECISIVE) and (text := _text(value)) not in ("", usual.get(name))
    }
    values["optimizer.name"] = short_name(str(settings["optimizer.name"]))  # wherever its module is
    return hashlib.sha256(json.dumps([values, fingerprint], sort_keys=True).encode()).hexdigest()


@cache
def _usual() -> dict[str, str]:
    """The default settings as text."""
    config = TrainConfig(data=Path(), model=ModelConfig())
    return {name: _text(value) for name, value in flatten(config.to_dict()).items()}


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.5g}"
    if isinstance(value, tuple):
        return json.dumps(value) if value else ""
    return "" if value is None else str(value)
