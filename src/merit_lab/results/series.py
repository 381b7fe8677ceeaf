"""Which runs are alike, and which may be compared, as columns of the frame of runs.

Runs of one series differ in their seed alone, or in how often they measure and save. Series may be compared
where their conditions agree: model, text, steps and batch. How a model is computed (its attention, the
chunks of its loss) makes another series but not another model, and its vocabulary follows from the text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.results.names import clean, display_names, place
from merit_lab.runs.settings import show
from merit_lab.runs.table import OUTCOME

Row = Mapping[str, Any]

_NO_SETTINGS = frozenset({"run", "folder", "status", "data", "series", "conditions", "left_out", *OUTCOME})
_MEASURED = ("environment.", "checkpoint.", "measure.", "evaluate.", "curvature.", "noise.")
_SEQUENCES, _FINGERPRINT = "measure.validation_sequences", "environment.data.fingerprint"
_SAME_MODEL = ("model.attention", "model.loss_chunk", "model.float32_residual", "model.vocab_size")
_FAMILIES = ("model.family", "model.settings.model_type", "model.preset")  # ours, or Hugging Face's
_PREFIXES = ("optimizer.", "options.", "model.", "measure.", "environment.data.")  # which readers know
_LONGEST_DETAILS = 60
_HASH_DIGITS = 8


def with_series(runs: pl.DataFrame, *, ignoring: Collection[str] = ()) -> pl.DataFrame:
    """The runs with three more columns, sorted by conditions, optimizer, learning rate and seed.

        series      "NorMuon, lr 0.024, momentum 0.9": the optimizer, and what else differs among its runs
                    with these conditions
        conditions  "gpt2 8x256, enwik8 bpe-16384, 200 steps of 512 x 512 tokens": equal if and only if runs
                    may be compared
        left_out    null where the run counts; otherwise why it does not: its status, if it neither finished
                    nor diverged, or the run that has the same settings and seed and got further

    Runs that differ in the settings of ``ignoring`` are of one series all the same.

    Example:
        >>> runs = pl.DataFrame({
        ...     "run": ["a", "b"], "status": ["finished", "running"], "seed": [0, 0], "steps": [9, 9],
        ...     "last_step": [9, 4], "optimizer.name": ["muon", "muon"], "optimizer.lr": [0.02, 0.01],
        ... })
        >>> for row in with_series(runs).to_dicts():
        ...     print(row["series"], row["conditions"], row["left_out"], sep=" | ")
        Muon, lr 0.01 | 9 steps | running
        Muon, lr 0.02 | 9 steps | None
    """
    rows = [
        {**row, "seed": row["seed"] if isinstance(row.get("seed"), int) else 0} for row in runs.to_dicts()
    ]
    conditions = _conditions(rows)
    optimizers = [str(row.get("optimizer.name") or "unknown") for row in rows]
    titles = display_names(optimizers)
    settings = _settings(runs.columns)

    def named(settings: Iterable[str]) -> list[str]:
        details = _told_apart(rows, list(zip(conditions, optimizers, strict=True)), settings)
        return [clean(", ".join([titles[one], *of])) for one, of in zip(optimizers, details, strict=True)]

    added = {
        "optimizer.name": optimizers,
        "series": named(name for name in settings if name not in ignoring),
        "conditions": conditions,
        "exact": named(settings),
    }
    order = list(dict.fromkeys(conditions))
    places = [
        pl.lit(pl.Series([order.index(one) for one in conditions], dtype=pl.Int64)),
        pl.lit(pl.Series([place(one)[0] for one in optimizers], dtype=pl.Int64)),
    ]
    lr = [name for name in settings if name == "optimizer.lr"]
    return (
        runs.with_columns(pl.Series(name, texts, dtype=pl.String) for name, texts in added.items())
        .with_columns(pl.Series("seed", [row["seed"] for row in rows], dtype=pl.Int64))
        .with_columns(left_out=_left_out(["conditions", "exact", "seed"]))
        .sort(*places, "optimizer.name", *lr, "series", "seed", maintain_order=True)
        .drop("exact")
    )


def layer_logits(steps: pl.DataFrame) -> pl.DataFrame:
    """The largest logit of each layer at each step in place of ``max_logits``: layer, from 1, and value."""
    layers = steps.drop_nulls("max_logits").with_columns(
        layer=pl.int_ranges(1, pl.col("max_logits").list.len() + 1)
    )
    heads = layers.explode("max_logits", "layer").explode("max_logits")
    columns = [name for name in heads.columns if name != "max_logits"]
    # NaN if there is one, which max drops.
    return heads.group_by(columns, maintain_order=True).agg(value=pl.col("max_logits").nan_max())


def makes_a_series(setting: str) -> bool:
    """Whether runs that differ in this setting, by its dotted name, are of different series."""
    return setting == _SEQUENCES or not (
        setting in _NO_SETTINGS or setting.startswith(_MEASURED) or setting.rpartition(".")[2] == "seed"
    )


def _settings(columns: Iterable[str]) -> list[str]:
    """The columns whose values make a series, the learning rate and what else the optimizer has first."""
    kept = [name for name in columns if makes_a_series(name) and name != "optimizer.name"]
    return sorted(kept, key=lambda name: (name != "optimizer.lr", not name.startswith("optimizer.")))


def _told_apart(rows: Sequence[Row], groups: Sequence[Hashable], settings: Iterable[str]) -> list[list[str]]:
    """For each row what tells it from the others of its group, as in "momentum 0.9"."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    details: list[list[str]] = [[] for _ in rows]
    for setting in settings:
        for alike in members.values():
            values = {repr(value): value for value in (rows[index].get(setting) for index in alike)}
            shown = {key: shown_as(setting, value) for key, value in values.items()}
            times = Counter(shown.values())
            for index in alike if len(values) > 1 else ():
                if (value := rows[index].get(setting)) is not None:
                    text = shown[repr(value)]
                    details[index].append(f"{_short(setting)} {text if times[text] == 1 else repr(value)}")
    return details


def shown_as(setting: str, value: object) -> str:
    """A setting's value for readers: of a fingerprint the first digits."""
    text = clean(show(value))
    return text[:_HASH_DIGITS] if setting == _FINGERPRINT and value is not None else text


def _short(setting: str) -> str:
    for prefix in _PREFIXES:
        setting = setting.removeprefix(prefix)
    return setting


def _left_out(alike: Sequence[str]) -> pl.Expr:
    """Why a run does not count, given the columns in which a run agrees with its repetitions."""
    finished, diverged = (pl.col("status") == status for status in ("finished", "diverged"))
    ended = finished | diverged
    order = ~ended, ~finished, -pl.col("last_step")
    furthest = pl.col("run").sort_by(*order, maintain_order=True).first().over(alike)
    repeated = pl.format("the settings and seed of {}", furthest)
    return pl.when(~ended).then("status").when(pl.col("run") != furthest).then(repeated)


def _conditions(rows: Sequence[Row]) -> list[str]:
    models = [_model(row) for row in rows]
    texts = _texts(rows)
    columns = [name for name in (rows[0] if rows else ()) if name.startswith("model.")]
    of_models = _told_apart(rows, models, [name for name in columns if name not in _SAME_MODEL])
    of_texts = _told_apart(rows, texts, [_FINGERPRINT, _SEQUENCES])
    parts = zip(map(_with, models, of_models), map(_with, texts, of_texts), map(_length, rows), strict=True)
    return [", ".join(filter(None, part)) or "settings that were not recorded" for part in parts]


def _with(name: str, details: Sequence[str]) -> str:
    """A name with what tells it from others: gpt2 12x768 (rope_base 1e+06)."""
    return clean(f"{name} ({clean(', '.join(details), _LONGEST_DETAILS)})".strip() if details else name)


def _model(row: Row) -> str:
    """The family, with layers and width if they are known: gpt2 12x768."""
    family = next((str(row[name]) for name in _FAMILIES if row.get(name) is not None), "")
    layers, width = row.get("model.layers"), row.get("model.width")
    return f"{family} {layers}x{width}".strip() if layers is not None and width is not None else family


def _texts(rows: Sequence[Row]) -> list[str]:
    """The corpus and its tokenizer, enwik8 bpe-16384; one name for one fingerprint, whatever the folder."""
    names: dict[str, str] = {}
    texts = []
    for row in rows:
        folder = Path(str(row.get("environment.data.folder") or "")).name
        text = f"{folder} {row.get('environment.data.tokenizer') or ''}".strip()
        texts.append(names.setdefault(str(row.get(_FINGERPRINT) or text), text))
    return texts


def _length(row: Row) -> str:
    """The planned steps and their batch, so that a run that diverged stays comparable."""
    steps, batch, context = (row.get(name) for name in ("steps", "batch", "model.context"))
    size = f"{batch} x {context} tokens" if context is not None else f"{batch} sequences"
    parts = [f"{steps:,} steps" if isinstance(steps, int) else "", size if batch is not None else ""]
    return " of ".join(filter(None, parts))
