"""The rows of an entry: its planned runs, joined to those that a folder holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.paper.plan import Corpus, Planned, identify
from merit_lab.runs import OVER, table
from merit_lab.study.answer import LOSS
from merit_lab.study.trial import Trial
from merit_lab.train import TrainConfig

ENDED = ("finished", "diverged")
_FINGERPRINT = "environment.data.fingerprint"
_SETTINGS = ("layers", "width", "context")
_NO_RUNS = pl.DataFrame(
    schema={
        "identity": pl.String,
        "run": pl.String,
        "folder": pl.String,
        "status": pl.String,
        **table.OUTCOME,
    }
)
_NO_STEPS = pl.DataFrame(schema=dict(table.COLUMNS))


@dataclass(frozen=True)
class Data:
    """An entry's runs, a row each, with what was measured; and their steps."""

    runs: pl.DataFrame
    """The columns of the table of runs, and panel, model, part, series, factor, lr; ``final``, the
    last loss of a run that ended; ``target``, a loss that all of a model reach; and ``left_out``, why a run
    does not count. A run that was not found has the status "missing"."""
    steps: pl.DataFrame = field(default_factory=lambda: _NO_STEPS)
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

    def folders(self) -> dict[str, Path]:
        """The folder of each run that finished."""
        rows = self.runs.filter(status="finished").select("run", "folder").iter_rows()
        return {run: Path(folder) for run, folder in rows}

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
class Records:
    """The runs that a folder of entries holds, by what identifies them."""

    folder: Path
    runs: pl.DataFrame = field(default_factory=lambda: _NO_RUNS)
    steps: pl.DataFrame = field(default_factory=lambda: _NO_STEPS)

    @classmethod
    def read(cls, folder: Path) -> Records:
        """Read the runs of a folder of entries: those in ``runs``, and those in ``runs.parquet``."""
        directories, kept = folder / "runs", folder / "runs.parquet"
        places = [directories] if any(directories.glob("*/config.json")) else []
        places += [kept] if kept.is_file() else []
        if not places:
            return cls(folder)
        runs, steps = table.read(*places)
        identities = [identify(row, row.get(_FINGERPRINT)) for row in runs.to_dicts()]
        # A run directory comes before a kept run with the same settings.
        runs = runs.with_columns(identity=pl.Series(identities)).unique(
            "identity", keep="first", maintain_order=True
        )
        return cls(folder, runs, steps)

    @property
    def corpora(self) -> list[Corpus]:
        """The data of the runs."""
        if _FINGERPRINT not in self.runs.columns:
            return []
        rows = self.runs.unique(_FINGERPRINT, maintain_order=True).drop_nulls(_FINGERPRINT)
        columns = rows.select("data", "model.vocab_size", _FINGERPRINT).iter_rows()
        return [Corpus(Path(data), vocab_size, fingerprint) for data, vocab_size, fingerprint in columns]

    def data(self, planned: Sequence[Planned], limit: int | None = None) -> Data:
        """The rows of planned runs; those that are not there get directories in the folder.

        With a limit, evaluations are those of so many items of each set.
        """
        rows = [
            {
                **{name: value for name, value in one._asdict().items() if name != "config"},
                "planned": one.folder,
                "seed": one.config.seed,
                "batch": one.config.batch,
                "steps": one.config.steps,
                "lr": one.config.optimizer.lr,
                "optimizer.name": one.config.optimizer.name,
                **{f"model.{name}": getattr(one.config.model, name) for name in _SETTINGS},
            }
            for one in planned
        ]
        wanted = pl.DataFrame(rows)
        known = pl.concat([_NO_RUNS, self.runs], how="diagonal_relaxed")
        known = known.drop(set(wanted.columns) - {"identity"}, strict=False)
        if limit is not None:
            known = known.rename(lambda name: name.replace(f"-first-{limit}.", "."))
        place = pl.format(f"{self.folder / 'runs'}/{{}}", "planned")
        frame = wanted.join(known, on="identity", how="left", maintain_order="left").with_columns(
            pl.col("run").fill_null(pl.col("planned")),
            pl.col("folder").fill_null(place),
            pl.col("status").fill_null("missing"),
        )
        configs = [one.config for one in planned]
        return Data(_judged(frame), self.steps, dict(zip(frame["run"], configs, strict=True)))


def _judged(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with what follows from how the runs ended: ``final``, ``target``, ``left_out``.

    The target is the lowest loss that every run of the model ended at or below, without those that diverged.
    """
    status = pl.col("status")
    frame = frame.with_columns(final=LOSS, left_out=pl.when(~status.is_in(ENDED)).then(status))
    finite = pl.when(pl.col("final").is_finite()).then(pl.col("final"))
    return frame.with_columns(target=finite.max().over("model"))
