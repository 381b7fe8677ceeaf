"""Which runs may be compared: those with the same model, data and number of tokens.

Batch size, learning rate and the other options of the optimizer may differ: they are what is compared. How a
model is computed (its attention, the chunks of its loss, the precision of its residual stream) does not make
it another model, and its vocabulary follows from the data.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from merit_lab.results.curves import tokens_per_step
from merit_lab.results.gather import MeasuredRun
from merit_lab.runs.settings import differing, show
from merit_lab.text import amount

_MODEL = "model."
_SAME_MODEL = frozenset(
    _MODEL + name for name in ("attention", "loss_chunk", "float32_residual", "vocab_size")
)
_SAME_LENGTH = 1.01  # tokens are rounded up to whole steps
_LONGEST_NAME = 40  # characters of a model's name
HASH_DIGITS = 8  # of a hash that people read


@dataclass(frozen=True)
class Conditions:
    """What runs must have in common to be compared, as text; empty if it was not recorded.

    Two runs may be compared if and only if their conditions are equal.
    """

    model: str = ""
    data: str = ""
    length: str = ""

    def __str__(self) -> str:
        return ", ".join(self.known(self.names())) or "settings that were not recorded"

    @classmethod
    def names(cls) -> list[str]:
        """The names of all conditions, in display order."""
        return [field.name for field in fields(cls)]

    def known(self, names: Iterable[str]) -> list[str]:
        """The conditions with these names, without those that were not recorded."""
        return [text for name in names if (text := str(getattr(self, name)))]


def conditions_of(runs: Sequence[MeasuredRun]) -> list[Conditions]:
    """The conditions of each run, just detailed enough to tell them apart."""
    columns = _models(runs), _data(runs), _lengths(runs)
    return [Conditions(*row) for row in zip(*columns, strict=True)]


def differing_conditions(conditions: Iterable[Conditions]) -> dict[str, list[str]]:
    """The values of the conditions that are not the same in all, by name."""
    distinct = list(dict.fromkeys(conditions))
    values = {
        name: list(dict.fromkeys(getattr(one, name) for one in distinct)) for name in Conditions.names()
    }
    return {name: texts for name, texts in values.items() if len(texts) > 1}


def distinguishing_conditions(conditions: Iterable[Conditions]) -> tuple[str, ...]:
    """The smallest set of names that tells all of ``conditions`` apart."""
    distinct = set(conditions)
    names = Conditions.names()
    choices = itertools.chain.from_iterable(
        itertools.combinations(names, size) for size in range(len(names) + 1)
    )
    return next(
        choice
        for choice in choices
        if len({tuple(getattr(one, name) for name in choice) for one in distinct}) == len(distinct)
    )


def data_names(runs: Iterable[MeasuredRun]) -> dict[str, str]:
    """A short name for each fingerprint: the corpus and its tokenizer, or eight hex digits."""
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
    for model in settings:
        by_name.setdefault(_model_name(model), []).append(model)
    differences = {name: differing(alike) for name, alike in by_name.items()}
    return [_with_details(name := _model_name(model), model, differences[name]) for model in settings]


def _decides_the_model(path: str) -> bool:
    return path.startswith(_MODEL) and path not in _SAME_MODEL


def _model_name(settings: Mapping[str, object]) -> str:
    """The family, with layers and width if they are known: gpt2 12x768."""
    families = ("family", "settings.model_type", "preset")  # ours, Hugging Face's, or only a preset
    family = next((str(settings[path]) for name in families if (path := _MODEL + name) in settings), "")
    shape = [settings.get(_MODEL + name) for name in ("layers", "width")]
    return " ".join([family] * bool(family) + [f"{shape[0]}x{shape[1]}"] * (None not in shape))


def _with_details(name: str, settings: Mapping[str, object], paths: Sequence[str]) -> str:
    """A name with the settings at ``paths``, or with a hash of them if that is too long."""
    details = [f"{path.removeprefix(_MODEL)} {show(settings[path])}" for path in paths if path in settings]
    whole = ", ".join([name] * bool(name) + details)
    if len(whole) <= _LONGEST_NAME or not details:
        return whole
    digest = hashlib.sha256(repr([(path, settings.get(path)) for path in paths]).encode()).hexdigest()
    return f"{name} {digest[:HASH_DIGITS]}".strip()


def _data(runs: Sequence[MeasuredRun]) -> list[str]:
    """The data, with the number of validation sequences if runs on the same data differ in it."""
    names = data_names(runs)
    data = [
        (names.get(run.fingerprint or "", ""), run.settings.get("measure.validation_sequences", "unknown"))
        for run in runs
    ]
    counts = Counter(name for name, _ in dict.fromkeys(data))
    return [
        f"{name} with {sequences} validation sequences".strip() if counts[name] > 1 else name
        for name, sequences in data
    ]


def _lengths(runs: Sequence[MeasuredRun]) -> list[str]:
    tokens = [_planned_tokens(run) for run in runs]
    names: dict[float | None, str] = {None: ""}
    shortest = 0.0  # of the lengths that count as equal
    for length in sorted({length for length in tokens if length is not None}):
        if length > shortest * _SAME_LENGTH:
            shortest = length
        names[length] = f"{amount(shortest)} tokens"
    return [names[length] for length in tokens]


def _planned_tokens(run: MeasuredRun) -> float | None:
    """The planned length of a run, so that one that diverged or was killed stays comparable."""
    steps, batch = run.settings.get("steps"), run.settings.get("batch")
    context = run.settings.get("model.context")
    if not isinstance(steps, int):
        return None
    if isinstance(batch, int) and isinstance(context, int):
        return float(steps * batch * context)
    tokens = steps * tokens_per_step(run.rows)
    return tokens if math.isfinite(tokens) else None
