"""Which runs are alike, and which may be compared, as columns of the frame of runs.

Runs of one series differ in their seed alone, or in how often they measure and save. Series may be compared
where their conditions agree: model, text, steps and batch. How a model is computed (its attention, the
chunks of its loss) makes another series but not another model, and its vocabulary follows from the text.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from merit_lab.results.names import clean, display_names, place
from merit_lab.runs.settings import show
from merit_lab.runs.table import OUTCOME

Row = Mapping[str, Any]

_NO_SETTINGS = frozenset({"run", "folder", "status", "data", "series", "conditions", "left_out", *OUTCOME})
_MEASURED = ("environment.", "checkpoint.", "measure.", "evaluate.", "curvature.", "noise.")
_SEQUENCES = "measure.validation_sequences"
_SAME_MODEL = ("model.attention", "model.loss_chunk", "model.float32_residual", "model.vocab_size")
_FAMILIES = ("model.family", "model.settings.model_type", "model.preset")  # ours, or Hugging Face's
_LONGEST_DETAILS = 40
_FINGERPRINT = "environment.data.fingerprint"
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
    rows = runs.to_dicts()
    conditions = _conditions(rows)
    settings = _settings(runs.columns)
    exact = _names(rows, conditions, settings)
    names = (
        _names(rows, conditions, [name for name in settings if name not in ignoring]) if ignoring else exact
    )
    reasons = _left_out(rows, list(zip(conditions, exact, strict=True)))
    order = {text: number for number, text in enumerate(dict.fromkeys(conditions))}
    in_order = sorted(
        range(len(rows)),
        key=lambda index: (
            order[conditions[index]],
            place(_optimizer(rows[index])),
            rows[index].get("optimizer.lr") or 0.0,
            names[index],
            _seed(rows[index]),
        ),
    )
    added = [
        pl.Series("series", names, dtype=pl.String),
        pl.Series("conditions", conditions, dtype=pl.String),
        pl.Series("left_out", reasons, dtype=pl.String),
    ]
    return runs.with_columns(added)[in_order]


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


def _names(rows: Sequence[Row], conditions: Sequence[str], settings: Sequence[str]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[conditions[index], _optimizer(row)].append(index)
    titles = display_names(_optimizer(row) for row in rows)
    whole = [""] * len(rows)
    for (_, optimizer), members in groups.items():
        details = _details([rows[index] for index in members], settings)
        for index, detail in zip(members, details, strict=True):
            whole[index] = ", ".join([optimizer, *detail])
    shown = [
        clean(titles[_optimizer(row)] + name.removeprefix(_optimizer(row)))
        for row, name in zip(rows, whole, strict=True)
    ]
    # Names that differ in what cannot be read must not become one series.
    meant = defaultdict(set)
    for short, name in zip(shown, whole, strict=True):
        meant[short].add(name)
    return [
        f"{short} {_hash(name)}" if len(meant[short]) > 1 else short
        for short, name in zip(shown, whole, strict=True)
    ]


def _details(rows: Sequence[Row], settings: Sequence[str]) -> list[list[str]]:
    """What tells each run from the others, as text."""
    details: list[list[str]] = [[] for _ in rows]
    for setting in _differing(rows, settings):
        values = [row[setting] for row in rows]
        shown = {repr(value): show(value) for value in values}
        alike = Counter(shown.values())
        for detail, value in zip(details, values, strict=True):
            if value is not None:
                text = show(value) if alike[show(value)] == 1 else repr(value)
                detail.append(f"{setting.removeprefix('optimizer.').removeprefix('options.')} {text}")
    return details


def _differing(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    return [name for name in columns if len({repr(row.get(name)) for row in rows}) > 1]


def _left_out(rows: Sequence[Row], series: Sequence[tuple[str, str]]) -> list[str | None]:
    reasons: list[str | None] = [None] * len(rows)
    counted: dict[tuple[str, str, int], Row] = {}
    further = sorted(
        range(len(rows)),
        key=lambda index: (rows[index]["status"] != "finished", -(rows[index].get("last_step") or 0)),
    )
    for index in further:
        row = rows[index]
        if row["status"] not in ("finished", "diverged"):
            reasons[index] = str(row["status"])
        elif (first := counted.setdefault((*series[index], _seed(row)), row)) is not row:
            reasons[index] = f"the settings and seed of {first['run']}"
    return reasons


def _conditions(rows: Sequence[Row]) -> list[str]:
    parts = zip(_models(rows), _texts(rows), map(_length, rows), strict=True)
    return [", ".join(filter(None, part)) or "settings that were not recorded" for part in parts]


def _models(rows: Sequence[Row]) -> list[str]:
    columns = [
        name for name in (rows[0] if rows else ()) if name.startswith("model.") and name not in _SAME_MODEL
    ]
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        alike[_model_name(row)].append(row)
    differing = {name: _differing(group, columns) for name, group in alike.items()}
    return [_model(row, differing[_model_name(row)]) for row in rows]


def _model_name(row: Row) -> str:
    """The family, with layers and width if they are known: gpt2 12x768."""
    family = next((str(row[name]) for name in _FAMILIES if row.get(name) is not None), "")
    layers, width = row.get("model.layers"), row.get("model.width")
    return f"{family} {layers}x{width}".strip() if layers is not None and width is not None else family


def _model(row: Row, differing: Sequence[str]) -> str:
    known = [(name.removeprefix("model."), row[name]) for name in differing if row[name] is not None]
    details = ", ".join(f"{name} {show(value)}" for name, value in known)
    if len(details) > _LONGEST_DETAILS:
        details = _hash(repr(known))
    return clean(" ".join(filter(None, (_model_name(row), details and f"({details})"))))


def _texts(rows: Sequence[Row]) -> list[str]:
    """The text and its tokenizer, with the number of validation sequences where they differ on one text."""
    names = data_names(rows)
    texts = [(names[row.get(_FINGERPRINT)], row.get(_SEQUENCES)) for row in rows]
    counts = Counter(name for name, _ in dict.fromkeys(texts))
    return [
        f"{name} with {sequences or 'all'} validation sequences" if counts[name] > 1 else name
        for name, sequences in texts
    ]


def data_names(rows: Iterable[Row]) -> dict[str | None, str]:
    """A short name for each fingerprint of data: the corpus and its tokenizer, and digits where two agree."""
    names: dict[str | None, str] = {None: ""}
    for row in rows:
        if (fingerprint := row.get(_FINGERPRINT)) is not None:
            folder = Path(str(row.get("environment.data.folder") or "")).name
            tokenizer = str(row.get("environment.data.tokenizer") or "")
            names.setdefault(
                fingerprint, clean(f"{folder} {tokenizer}".strip()) or fingerprint[:_HASH_DIGITS]
            )
    taken = Counter(names.values())
    return {
        fingerprint: f"{name} {fingerprint[:_HASH_DIGITS]}" if fingerprint and taken[name] > 1 else name
        for fingerprint, name in names.items()
    }


def _length(row: Row) -> str:
    """The planned steps and their batch, so that a run that diverged stays comparable."""
    steps, batch, context = (row.get(name) for name in ("steps", "batch", "model.context"))
    size = f"{batch} x {context} tokens" if context is not None else f"{batch} sequences"
    parts = ([f"{steps:,} steps"] if steps is not None else []) + ([size] if batch is not None else [])
    return " of ".join(parts)


def _optimizer(row: Row) -> str:
    return str(row.get("optimizer.name") or "unknown")


def _seed(row: Row) -> int:
    seed = row.get("seed")
    return seed if isinstance(seed, int) else 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
