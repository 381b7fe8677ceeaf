"""Runs in series: of what decides a result, the runs of a series differ in their seed alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from merit_lab.report.comparable import Conditions, conditions_of, telling_conditions
from merit_lab.report.gather import DISPLAY_NAMES, MeasuredRun, differing, display_names, show


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seed alone, or in what changes no result, under one name.

    ``name`` tells it from the series that it may be compared with, which have the same ``conditions``;
    ``telling`` are the words of these that tell it from the others. ``repeats`` are runs with the settings
    and the seed of one of its own, which do not count; see ``group``.
    """

    name: str
    optimizer: str
    lr: float | None
    runs: tuple[MeasuredRun, ...]
    repeats: tuple[MeasuredRun, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    telling: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name among all series of a report."""
        return f"{self.name} ({', '.join(self.telling)})" if self.telling else self.name


def group(runs: Sequence[MeasuredRun]) -> list[Series]:
    """Runs in series: comparable ones together, by optimizer in a fixed order and then by learning rate.

    Of several runs with the same settings and the same seed, as a run and its excerpt are, one counts: the
    one that came furthest, and of these the one with the most measurements.
    """
    settings = [run.settings for run in runs]
    varying = [path for path in differing(settings) if _makes_a_series(path)]
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, own in enumerate(settings):
        groups.setdefault(tuple(own.get(path) for path in varying), []).append(index)
    names = display_names({_optimizer(own) for own in settings})
    conditions = conditions_of(runs)
    telling = telling_conditions(conditions)
    series = []
    for members in groups.values():
        first, first_conditions = settings[members[0]], conditions[members[0]]
        rivals = [
            own
            for own, its_conditions in zip(settings, conditions, strict=True)
            if _optimizer(own) == _optimizer(first) and its_conditions == first_conditions
        ]
        within = [path for path in differing(rivals) if _makes_a_series(path)]
        details = []
        for path in within:
            if path not in first:
                continue
            value = _show_among([own.get(path) for own in rivals], first.get(path))
            details.append(f"{path.removeprefix('optimizer.')} {value}")
        counted, repeats = _once([runs[index] for index in members])
        lr = first.get("optimizer.lr")
        series.append(
            Series(
                name=", ".join([names[_optimizer(first)], *details]),
                optimizer=_optimizer(first),
                lr=float(lr) if isinstance(lr, int | float) else None,
                runs=counted,
                repeats=repeats,
                conditions=first_conditions,
                telling=tuple(first_conditions.words(telling)),
            )
        )
    places = list(dict.fromkeys(conditions))
    return sorted(series, key=lambda own: (places.index(own.conditions), _order(own)))


def have_other_data(series: Iterable[Series]) -> bool:
    """Whether series are not all on the same data, so that a token of one is not a token of another."""
    return len({run.fingerprint for own in series for run in own.runs}) > 1


def _once(runs: Sequence[MeasuredRun]) -> tuple[tuple[MeasuredRun, ...], tuple[MeasuredRun, ...]]:
    """Runs that differ in their seed alone: one for each seed, and the others."""
    counted: dict[object, MeasuredRun] = {}
    repeats = []
    for run in sorted(runs, key=lambda run: run.extent, reverse=True):
        seeds = tuple((path, value) for path, value in run.settings.items() if _is_seed(path))
        if counted.setdefault(seeds, run) is not run:
            repeats.append(run)

    def in_order(own: Iterable[MeasuredRun]) -> tuple[MeasuredRun, ...]:
        return tuple(sorted(own, key=lambda run: (run.seed, run.name)))

    return in_order(counted.values()), in_order(repeats)


def _show_among(values: Iterable[object], value: object) -> str:
    """One of several values as ``show`` writes it; in full where another would read the same."""
    alike = {repr(own) for own in values if show(own) == show(value)}
    return show(value) if len(alike) == 1 else repr(value)


def _makes_a_series(path: str) -> bool:
    """Whether runs that differ in a setting are another series: how often one looks changes no result."""
    group, _, name = path.partition(".")
    looking = group == "checkpoint" or (group == "measure" and name != "validation_sequences")
    return not looking and not _is_seed(path)


def _is_seed(path: str) -> bool:
    return path.rpartition(".")[2] == "seed"


def _optimizer(settings: Mapping[str, object]) -> str:
    return str(settings.get("optimizer.name", settings.get("optimizer", "unknown")))


def _order(series: Series) -> tuple[int, str, float, str]:
    known = list(DISPLAY_NAMES)
    place = known.index(series.optimizer) if series.optimizer in known else len(known)
    return place, series.optimizer, series.lr or 0.0, series.label
