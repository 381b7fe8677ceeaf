"""Which runs may be compared: those with one model, on the same data, for as many tokens.

Batch, learning rate and all else of the optimizer are what one compares. How a model is computed (its
attention, the chunks of its loss, the precision of its residual stream) does not make another model, and its
vocabulary follows from the data.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from merit_lab.report.curves import tokens_per_step
from merit_lab.report.gather import MeasuredRun, differing, show

_MODEL = "model."
_NO_OTHER_MODEL = frozenset(
    _MODEL + name for name in ("attention", "loss_chunk", "float32_residual", "vocab_size")
)
_SAME_LENGTH = 1.01  # the tokens asked for are rounded up to whole steps
_LONGEST_NAME = 40  # of a model in words
HASH_DIGITS = 8  # of a hash, where people read it


@dataclass(frozen=True)
class Conditions:
    """What runs must have in common to be compared, in words; empty where it was not recorded.

    Two runs may be compared where the words are the same, and only there.
    """

    model: str = ""
    data: str = ""
    length: str = ""

    def __str__(self) -> str:
        return ", ".join(self.words(self.names())) or "settings that were not recorded"

    @classmethod
    def names(cls) -> list[str]:
        """The names of all conditions, in the order in which they are told."""
        return [own.name for own in fields(cls)]

    def words(self, names: Iterable[str]) -> list[str]:
        """The conditions of these names that are known."""
        return [word for name in names if (word := str(getattr(self, name)))]


def conditions_of(runs: Sequence[MeasuredRun]) -> list[Conditions]:
    """The conditions of each of several runs, in as few words as tell them apart."""
    columns = _models(runs), _data(runs), _lengths(runs)
    return [Conditions(*words) for words in zip(*columns, strict=True)]


def differing_conditions(conditions: Iterable[Conditions]) -> dict[str, list[str]]:
    """The words of the conditions that are not the same in all, by their names."""
    distinct = list(dict.fromkeys(conditions))
    values = {
        name: list(dict.fromkeys(getattr(own, name) for own in distinct)) for name in Conditions.names()
    }
    return {name: own for name, own in values.items() if len(own) > 1}


def telling_conditions(conditions: Iterable[Conditions]) -> tuple[str, ...]:
    """The names of as few conditions as tell all of ``conditions`` apart."""
    distinct = set(conditions)
    names = Conditions.names()
    choices = itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    )
    return next(
        own
        for own in choices
        if len({tuple(getattr(it, name) for name in own) for it in distinct}) == len(distinct)
    )


def data_names(runs: Iterable[MeasuredRun]) -> dict[str, str]:
    """A short name for the data of each fingerprint: the corpus and its tokenizer, or eight hex digits."""
    names: dict[str, str] = {}
    for run in runs:
        data, fingerprint = run.environment.get("data", {}), run.fingerprint
        if fingerprint is None:
            continue
        tokenizer = str(data.get("tokenizer", "unknown"))
        corpus = Path(str(data.get("folder", ""))).name
        known = [corpus] if corpus else []
        known += [tokenizer] if tokenizer != "unknown" else []
        names.setdefault(fingerprint, " ".join(known) if corpus else fingerprint[:HASH_DIGITS])
    taken = Counter(names.values())
    return {
        fingerprint: f"{name} {fingerprint[:HASH_DIGITS]}" if taken[name] > 1 else name
        for fingerprint, name in names.items()
    }


def _models(runs: Sequence[MeasuredRun]) -> list[str]:
    settings = [
        {path: value for path, value in run.settings.items() if _decides_the_model(path)} for run in runs
    ]
    by_name: dict[str, list[Mapping[str, object]]] = {}
    for own in settings:
        by_name.setdefault(_model_name(own), []).append(own)
    telling = {name: differing(alike) for name, alike in by_name.items()}
    return [_with_details(name := _model_name(own), own, telling[name]) for own in settings]


def _decides_the_model(path: str) -> bool:
    return path.startswith(_MODEL) and path not in _NO_OTHER_MODEL


def _model_name(settings: Mapping[str, object]) -> str:
    """The family, and the layers and the width where they are known: gpt2 12x768."""
    families = ("family", "settings.model_type", "preset")  # ours, of Hugging Face, of a preset alone
    family = next((str(settings[path]) for name in families if (path := _MODEL + name) in settings), "")
    shape = [settings.get(_MODEL + name) for name in ("layers", "width")]
    return " ".join([family] * bool(family) + [f"{shape[0]}x{shape[1]}"] * (None not in shape))


def _with_details(name: str, settings: Mapping[str, object], paths: Sequence[str]) -> str:
    """A name with the settings at ``paths``; with a hash of them where they are many."""
    details = [f"{path.removeprefix(_MODEL)} {show(settings[path])}" for path in paths if path in settings]
    whole = ", ".join([name] * bool(name) + details)
    if len(whole) <= _LONGEST_NAME or not details:
        return whole
    digest = hashlib.sha256(repr([(path, settings.get(path)) for path in paths]).encode()).hexdigest()
    return f"{name} {digest[:HASH_DIGITS]}".strip()


def _data(runs: Sequence[MeasuredRun]) -> list[str]:
    """The data; where runs on the same data differ in it, on how many sequences the loss is measured too."""
    names = data_names(runs)
    own = [
        (names.get(run.fingerprint or "", ""), run.settings.get("measure.validation_sequences", "unknown"))
        for run in runs
    ]
    counts = Counter(name for name, _ in dict.fromkeys(own))
    return [
        f"{name} with {sequences} validation sequences".strip() if counts[name] > 1 else name
        for name, sequences in own
    ]


def _lengths(runs: Sequence[MeasuredRun]) -> list[str]:
    tokens = [_planned_tokens(run) for run in runs]
    names: dict[float | None, str] = {None: ""}
    shortest = 0.0  # of those that count as one length
    for own in sorted({own for own in tokens if own is not None}):
        if own > shortest * _SAME_LENGTH:
            shortest = own
        names[own] = f"{_short(shortest)} tokens"
    return [names[own] for own in tokens]


def _planned_tokens(run: MeasuredRun) -> float | None:
    """How long a run was to be: one that diverged or was killed is as comparable as the others."""
    steps, batch = run.settings.get("steps"), run.settings.get("batch")
    context = run.settings.get("model.context")
    if not isinstance(steps, int):
        return None
    if isinstance(batch, int) and isinstance(context, int):
        return float(steps * batch * context)
    tokens = steps * tokens_per_step(run.rows)
    return tokens if math.isfinite(tokens) else None


def _short(number: float) -> str:
    """A number of three digits with its unit: 26.2M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
