"""Which runs an entry needs, as a query over a scale; and the rows of the table of runs that answer it.

A run is known by its settings and its data, whatever its folder is called. So entries share runs, and kept
runs are found again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from merit_lab.data import Dataset
from merit_lab.models import ModelConfig
from merit_lab.models.transformers_config import AnyModelConfig
from merit_lab.paper.scales import Scale, Setup
from merit_lab.results.names import display_name, short_name
from merit_lab.runs import OVER, durable, table
from merit_lab.runs.settings import flatten
from merit_lab.study.trial import Trial
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig
from merit_lab.train.config import MeritPart

WATCHED = ("adamw", "lamb", "merit")
"""Most entries are about these, so their runs keep checkpoints on the way."""
WARMUP = 0.02  # the paper's
ENDED = ("finished", "diverged")
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
        is_watched = optimizer in WATCHED and not self.without and not self.qk_norm
        checkpoints = scale.num_checkpoints if is_watched else 1
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
        series = self.series.format(name=display_name(optimizer))
        panel = setup.model_name if self.by_model else setup.name
        return Planned(config, panel, setup.model_name, setup.paper, series, self.part, factor)


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


def plan(queries: Iterable[Runs], scale: Scale, seeds: int) -> list[Planned]:
    """The runs of several queries, each once; all those of a seed before those of the next."""
    planned = [one for query in queries for one in query.planned(scale, seeds)]
    unique = {(one.config.fingerprint, one.panel, one.series): one for one in planned}
    return sorted(unique.values(), key=lambda one: one.config.seed)


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
        name = self.folder.resolve().name
        known = {"name": name, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint}
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


@dataclass(frozen=True)
class Data:
    """An entry's runs, a row each, with what was measured; and their steps."""

    runs: pl.DataFrame
    """The columns of the table of runs, and panel, model, paper, series, part, factor, lr; ``final``, the
    last loss of a run that ended; ``target``, a loss that all of a panel reach; and ``left_out``, why a run
    does not count. A run that was not found has the status "missing"."""
    steps: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=dict(table.COLUMNS)))
    """Of these runs, and perhaps of others."""
    configs: Mapping[str, TrainConfig] = field(default_factory=dict)
    """Of each run, by its name."""

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

    def measured(self, column: str, *settings: str) -> pl.DataFrame:
        """A column of the steps where it is known, with some settings of the runs: run, step, these."""
        runs = self.runs.select("run", *settings).unique("run", maintain_order=True)
        steps = self.steps.select("run", "step", column).drop_nulls()
        return runs.join(steps, on="run", maintain_order="left_right")

    def folders(self, status: str = "finished") -> list[tuple[str, Path]]:
        """The runs with this status, each once, and their folders."""
        rows = self.runs.filter(status=status).select("run", "folder").unique(maintain_order=True).rows()
        return [(run, Path(folder)) for run, folder in rows]

    @property
    def left(self) -> list[Trial]:
        """The runs that are yet to train, or to go on with, as trials."""
        rows = self.runs.filter(~pl.col("status").is_in(OVER)).unique("run", maintain_order=True)
        return [Trial(Path(folder), self.configs[run]) for run, folder in rows.select("run", "folder").rows()]

    @property
    def statuses(self) -> str:
        """The number of runs with each status, in words."""
        counts = self.runs.group_by("status", maintain_order=True).len().rows()
        return ", ".join(f"{count} {status}" for status, count in counts)

    @property
    def trouble(self) -> list[str]:
        """A line for each run that did not finish, and one for all that are missing."""
        rows = self.runs.unique("run", maintain_order=True).select("run", "status", "message")
        missing = rows.filter(status="missing")["run"]
        lines = [f"missing: {', '.join(missing[:3])}" + ", ..." * (len(missing) > 3)] if len(missing) else []
        others = rows.filter(~pl.col("status").is_in(["finished", "missing"]))
        return [": ".join(filter(None, row)) for row in others.iter_rows()] + lines


@dataclass(frozen=True)
class Found:
    """The runs that a folder holds, by what identifies them."""

    runs: pl.DataFrame
    steps: pl.DataFrame

    @classmethod
    def in_folder(cls, folder: Path) -> Found:
        """Read the runs of a folder of entries: those in ``runs``, and those in ``runs.parquet``."""
        directories, kept = folder / "runs", folder / "runs.parquet"
        places = [kept] if kept.is_file() else []
        if any(directories.glob("*/config.json")):
            places.insert(0, directories)
        runs, steps = table.read(*places) if places else (pl.DataFrame(), Data(pl.DataFrame()).steps)
        identities = [_identity(row, row.get("environment.data.fingerprint")) for row in runs.to_dicts()]
        runs = runs.with_columns(pl.Series("identity", identities, dtype=pl.String))
        # A run directory comes before a kept run with the same settings.
        return cls(runs.unique("identity", keep="first", maintain_order=True), steps)

    def data(
        self, planned: Sequence[Planned], folder: Path, corpus: Corpus, limit: int | None = None
    ) -> Data:
        """The rows of planned runs; those that are not there get directories in the folder.

        With a limit, evaluations are those of so many items of each set.
        """
        configs = [replace(one.config, data=corpus.folder).resolve(corpus.vocab_size) for one in planned]
        identities = [identify(config, corpus) for config in configs]
        names = [_name(*both) for both in zip(configs, identities, strict=True)]
        rows = [
            {
                "identity": identity,
                "planned": name,
                "planned_folder": str(folder / "runs" / name),
                **one._asdict(),
                "seed": config.seed,
                "batch": config.batch,
                "steps": config.steps,
                "lr": config.optimizer.lr,
                "optimizer.name": config.optimizer.name,
                **{f"model.{name}": getattr(config.model, name) for name in ("layers", "width", "context")},
            }
            for one, config, identity, name in zip(planned, configs, identities, names, strict=True)
        ]
        wanted = pl.DataFrame(rows).drop("config")
        known = self.runs.drop(set(wanted.columns) - {"identity"}, strict=False)
        if limit is not None:
            known = known.rename(lambda name: name.replace(f"-first-{limit}.", "."))
        frame = wanted.join(known, on="identity", how="left", maintain_order="left")
        absent = {"run": pl.String, "folder": pl.String, "status": pl.String, **table.OUTCOME}
        frame = frame.with_columns(
            pl.lit(None, kind).alias(name) for name, kind in absent.items() if name not in frame.columns
        )
        frame = frame.with_columns(
            pl.col("run").fill_null(pl.col("planned")),
            pl.col("folder").fill_null(pl.col("planned_folder")),
            pl.col("status").fill_null("missing"),
        )
        return Data(_judged(frame), self.steps, dict(zip(frame["run"], configs, strict=True)))


def identify(config: TrainConfig, corpus: Corpus) -> str:
    """What identifies a run: a hash of its settings and its data."""
    return _identity(flatten(config.to_dict()), corpus.fingerprint)


def _judged(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with what follows from how the runs ended: ``final``, ``target``, ``left_out``.

    The target is the lowest loss that every run of the panel ended at or below, without those that diverged.
    """
    finished, diverged = (pl.col("status") == status for status in ENDED)
    final = pl.when(diverged).then(math.inf).when(finished).then(pl.col("validation_loss"))
    frame = frame.with_columns(final=final, left_out=pl.when(~(finished | diverged)).then(pl.col("status")))
    finite = pl.when(pl.col("final").is_finite()).then(pl.col("final"))
    return frame.with_columns(target=finite.max().over("panel"))


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
    parts = [
        f"{model.family}-{model.layers}x{model.width}",
        "-without-".join([short_name(optimizer.name), *optimizer.without]),
        "overridden" if optimizer.overrides else "",
        f"warmup{optimizer.warmup:g}" if optimizer.warmup != WARMUP else "",
        "qk-norm" if isinstance(model, ModelConfig) and model.qk_norm else "",
        f"lr{optimizer.lr:g}-batch{config.batch}-seed{config.seed}-{identity[:8]}",
    ]
    return "-".join(filter(None, parts))
