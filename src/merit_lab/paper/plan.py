"""Which runs an entry needs, as a query over a scale; and the rows of the table of runs that answer it.

A run is known by its settings and its data, whatever its folder is called. So entries share runs, and runs of
an archive are found again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from merit_lab.data import Dataset
from merit_lab.models import ModelConfig
from merit_lab.models.names import AnyModelConfig
from merit_lab.paper.scales import Scale, Setup
from merit_lab.results.names import display_name, short_name
from merit_lab.runs import durable, table
from merit_lab.runs.settings import flatten
from merit_lab.study import Trial
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.optimizer_config import MeritPart

WATCHED = ("adamw", "lamb", "merit")
"""Most entries are about these, so their runs keep checkpoints on the way."""
WARMUP = 0.02  # the paper's
_OVER = ("finished", "diverged")
_NO_DATA = Path()  # until the data are known
# Settings that decide what is trained. How often a run is measured or saved is not one of them.
_DECISIVE = ("model.", "optimizer.", "batch", "steps", "seed", "precision", "measure.validation_sequences")


@dataclass(frozen=True)
class Runs:
    """A query: setups x optimizers x factors of their learning rates x seeds, with some settings changed."""

    setups: str
    """Of the scale, by name; see ``Scale.setups``."""
    optimizers: tuple[str, ...]
    factors: tuple[float, ...] = (1.0,)
    """Of the setup's learning rate."""
    rate_of: str = ""
    """The optimizer whose learning rate it is, if not its own."""
    seeds: int | None = None
    """At most so many."""
    warmup: float = WARMUP
    qk_norm: bool = False
    without: tuple[MeritPart, ...] = ()
    overrides: str = ""
    """A format of the model: "*query*:rows={model.head_width}"."""
    series: str = "{name}"
    """The name of the series, a format of the optimizer's ``name``."""
    part: str = ""
    """What tells these runs from the entry's others of the same series."""
    by_model: bool = False
    """Shown with the other setups of its model, whatever their batches."""

    def planned(self, scale: Scale, seeds: int) -> list[Planned]:
        """The runs at a scale, seed by seed."""
        return [
            self._planned(scale, setup, optimizer, factor, seed)
            for seed in range(min(seeds, self.seeds or seeds))
            for setup in scale.setups(self.setups)
            for optimizer in self.optimizers
            for factor in self.factors
        ]

    def _planned(self, scale: Scale, setup: Setup, optimizer: str, factor: float, seed: int) -> Planned:
        steps = math.ceil(setup.tokens / (setup.batch * setup.model.context))
        every = max(1, steps // scale.num_measurements)
        checkpoints = 1
        if optimizer in WATCHED and not self.without and not self.qk_norm:
            checkpoints = scale.num_checkpoints
        config = TrainConfig(
            data=_NO_DATA,
            model=replace(setup.model, qk_norm=self.qk_norm),
            optimizer=OptimizerConfig(
                name=optimizer,
                lr=float(f"{factor * setup.rates[self.rate_of or optimizer]:.3g}"),
                warmup=self.warmup,
                without=self.without,
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
            seed=seed,
        )
        return Planned(
            config=config,
            panel=setup.model_name if self.by_model else setup.name,
            model=setup.model_name,
            paper=setup.paper,
            series=self.series.format(name=display_name(optimizer)),
            part=self.part,
            factor=factor,
        )


class Planned(NamedTuple):
    """A run that an entry needs, and where the entry shows it."""

    config: TrainConfig
    panel: str
    model: str
    paper: str
    """The size of the paper's model; empty if none."""
    series: str
    part: str
    factor: float


@dataclass(frozen=True)
class Corpus:
    """The data of runs, known even when their files are gone."""

    folder: Path
    vocab_size: int | None
    fingerprint: str

    @classmethod
    def of(cls, dataset: Dataset) -> Corpus:
        """Those of a folder of token files."""
        return cls(dataset.folder, dataset.vocab_size, dataset.fingerprint)

    def remember(self, folder: Path) -> None:
        """Write them into a folder of runs."""
        folder.mkdir(parents=True, exist_ok=True)
        known = {
            "name": self.folder.resolve().name,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
        }
        durable.write(folder / "data.json", json.dumps(known, indent=2) + "\n")

    @classmethod
    def recall(cls, folder: Path) -> Corpus | None:
        """Read what ``remember`` wrote into the folder; None if there is nothing."""
        path = folder / "data.json"
        if not path.exists():
            return None
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            return cls(Path(known["name"]), known["vocab_size"], known["fingerprint"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged ({error!r}); remove it and name the data of the runs with --data"
            ) from None


class OneRun(NamedTuple):
    """A row of an entry's runs, its steps, and its configuration."""

    row: Mapping[str, Any]
    steps: pl.DataFrame
    config: TrainConfig

    def points(self, column: str) -> list[tuple[int, float]]:
        """The finite values of a column of the steps, with their steps."""
        if column not in self.steps.columns:
            return []
        known = self.steps.select("step", column).drop_nulls().rows()
        return [(step, value) for step, value in known if math.isfinite(value)]


@dataclass(frozen=True)
class Data:
    """An entry's runs, a row each, with what was measured; and their steps."""

    runs: pl.DataFrame
    """The columns of the table of runs, and panel, model, paper, series, part, factor. A run that was not
    found has the status "missing"."""
    steps: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    """Of each run, by its name."""
    configs: Mapping[str, TrainConfig] = field(default_factory=dict)

    def where(self, **values: object) -> Data:
        """The rows with these values; a value that is None or empty is any."""
        wanted = {name: value for name, value in values.items() if value not in (None, "")}
        return replace(self, runs=self.runs.filter(**wanted)) if wanted else self

    def groups(self, *columns: str) -> list[tuple[tuple[Any, ...], Data]]:
        """The rows with the same values in these columns, in order."""
        frames = self.runs.partition_by(*columns, maintain_order=True, as_dict=True, include_key=True)
        return [(key, replace(self, runs=frame)) for key, frame in frames.items()]

    def values(self, column: str) -> list[Any]:
        """The values of a column, each once, in order."""
        return self.runs[column].unique(maintain_order=True).to_list()

    @cached_property
    def all(self) -> list[OneRun]:
        """Every run with its steps."""
        empty = pl.DataFrame(schema={"step": pl.Int64})
        return [
            OneRun(row, self.steps.get(row["run"], empty), self.configs[row["run"]])
            for row in self.runs.iter_rows(named=True)
        ]

    @property
    def statuses(self) -> str:
        """The number of runs with each status, in words."""
        counts = self.runs.group_by("status", maintain_order=True).len().rows()
        return ", ".join(f"{count} {status}" for status, count in counts)

    @property
    def trouble(self) -> list[str]:
        """A line for each run that did not finish."""
        rows = self.runs.unique("run", maintain_order=True).filter(pl.col("status") != "finished")
        return [
            f"{row['run']}: {row['status']}" + (f": {row['message']}" if row.get("message") else "")
            for row in rows.iter_rows(named=True)
        ]


@dataclass(frozen=True)
class Found:
    """The runs that a folder holds, by what identifies them."""

    runs: pl.DataFrame
    steps: Mapping[str, pl.DataFrame]

    @classmethod
    def in_folder(cls, folder: Path) -> Found:
        """Read the runs of a folder of entries: those in ``runs``, and those in ``runs.parquet``."""
        places = [place for place in (folder / "runs", folder / "runs.parquet") if _has_runs(place)]
        if not places:
            return cls(
                pl.DataFrame({"identity": [], "run": []}, schema_overrides={"identity": pl.String}), {}
            )
        runs, steps = table.read(*places)
        identities = [_identity(row, row.get("environment.data.fingerprint")) for row in runs.to_dicts()]
        runs = runs.with_columns(pl.Series("identity", identities, dtype=pl.String))
        by_run = steps.partition_by("run", as_dict=True)
        # A run directory comes before a kept run with the same settings.
        runs = runs.unique("identity", keep="first", maintain_order=True)
        return cls(runs, {key[0]: frame for key, frame in by_run.items()})

    def data(
        self, planned: Sequence[Planned], trials: Sequence[Trial], corpus: Corpus, limit: int | None = None
    ) -> Data:
        """The rows of planned runs; ``trials`` are the same runs with their folders.

        With a limit, evaluations are those of so many items of each set.
        """
        rows = [
            {
                "identity": identify(trial.config, corpus),
                "planned": trial.folder.name,
                **{name: getattr(one, name) for name in ("panel", "model", "paper", "series", "part")},
                "factor": one.factor,
                "seed": trial.config.seed,
                "batch": trial.config.batch,
                "lr": trial.config.optimizer.lr,
                "optimizer.name": trial.config.optimizer.name,
            }
            for one, trial in zip(planned, trials, strict=True)
        ]
        known = self.runs.drop("seed", "batch", "optimizer.name", strict=False)
        if limit is not None:
            known = known.rename(
                {
                    name: name.replace(f"-first-{limit}.", ".")
                    for name in known.columns
                    if f"-first-{limit}." in name
                }
            )
        frame = pl.DataFrame(rows).join(known, on="identity", how="left", maintain_order="left")
        frame = frame.with_columns(pl.col("run").fill_null(pl.col("planned")))
        for name in ("status", "validation_loss", *table.OUTCOME):
            if name not in frame.columns:
                frame = frame.with_columns(pl.lit(None, table.OUTCOME.get(name, pl.String)).alias(name))
        frame = frame.with_columns(pl.col("status").fill_null("missing"))
        names = frame["run"].to_list()
        configs = {name: trial.config for name, trial in zip(names, trials, strict=True)}
        return Data(
            _with_target(frame), {name: self.steps[name] for name in names if name in self.steps}, configs
        )

    def trials(self, planned: Iterable[Planned], folder: Path, corpus: Corpus) -> list[Trial]:
        """The planned runs with their folders: those of the runs that are there, or new ones."""
        folders = dict(self.runs.select("identity", "folder").rows()) if "folder" in self.runs.columns else {}
        trials = []
        for one in planned:
            config = replace(one.config, data=corpus.folder).resolve(corpus.vocab_size)
            identity = identify(config, corpus)
            path = (
                Path(folders[identity]) if identity in folders else folder / "runs" / _name(config, identity)
            )
            trials.append(Trial(path, config))
        return trials


def plan(queries: Iterable[Runs], scale: Scale, seeds: int) -> list[Planned]:
    """The runs of several queries, each once; all those of a seed before those of the next."""
    planned = [one for query in queries for one in query.planned(scale, seeds)]
    unique = {(one.config.fingerprint, one.panel, one.series): one for one in planned}
    return sorted(unique.values(), key=lambda one: one.config.seed)


def identify(config: TrainConfig, corpus: Corpus) -> str:
    """What identifies a run: a hash of its settings and its data."""
    return _identity(flatten(config.to_dict()), corpus.fingerprint)


def _identity(settings: Mapping[str, object], fingerprint: str | None) -> str:
    """The hash of the settings that are not the defaults, so that records from before a setting are found."""
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
    config = TrainConfig(data=_NO_DATA, model=ModelConfig())
    return {name: _text(value) for name, value in flatten(config.to_dict()).items()}


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.5g}"
    if isinstance(value, tuple):
        return json.dumps(value) if value else ""
    return "" if value is None else str(value)


def _name(config: TrainConfig, identity: str) -> str:
    model: AnyModelConfig = config.model
    optimizer = config.optimizer
    return "-".join(
        [
            f"{model.family}-{model.layers}x{model.width}",
            "-without-".join([short_name(optimizer.name), *optimizer.without]),
            *(["overridden"] if optimizer.overrides else []),
            *([f"warmup{optimizer.warmup:g}"] if optimizer.warmup != WARMUP else []),
            *(["qk-norm"] if isinstance(model, ModelConfig) and model.qk_norm else []),
            f"lr{optimizer.lr:g}",
            f"batch{config.batch}",
            f"seed{config.seed}",
            identity[:8],
        ]
    )


def _has_runs(place: Path) -> bool:
    return place.is_file() or (place.is_dir() and any(place.glob("*/config.json")))


def _with_target(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with ``final``, the last loss of runs that ended, and ``target``, which all of a panel reach.

    The target is the lowest loss that every run of the panel ended at or below, without those that diverged.
    """
    final = (
        pl.when(pl.col("status") == "diverged")
        .then(math.inf)
        .when(pl.col("status") == "finished")
        .then(pl.col("validation_loss"))
    )
    frame = frame.with_columns(final=final)
    finite = pl.when(pl.col("final").is_finite()).then(pl.col("final"))
    return frame.with_columns(target=finite.max().over("panel"))
