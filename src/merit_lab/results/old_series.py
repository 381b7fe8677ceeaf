"""Group runs into series: runs whose settings differ only in the seed, or in what affects no result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from merit_lab.results.comparable import Conditions, conditions_of, distinguishing_conditions
from merit_lab.results.gather import DISPLAY_NAMES, MeasuredRun, display_names
from merit_lab.runs.settings import differing, show


@dataclass(frozen=True)
class Series:
    """Runs that differ only in their seed, or in settings that change no result.

    ``name`` is unique among the series that it may be compared with, which have the same ``conditions``;
    ``distinguishing`` are the conditions that tell it from the others. ``repeats`` are runs with the same
    settings and seed as one of ``runs``; they do not count, see ``group``.
    """

    name: str
    optimizer: str
    lr: float | None
    runs: tuple[MeasuredRun, ...]
    repeats: tuple[MeasuredRun, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    distinguishing: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The unique name among all series of a report."""
        return f"{self.name} ({', '.join(self.distinguishing)})" if self.distinguishing else self.name


def group(runs: Sequence[MeasuredRun]) -> list[Series]:
    """Group runs into series: comparable ones together, by optimizer in a fixed order, then by learning rate.

    If several runs have the same settings and seed, such as a run and its excerpt, only one counts: the one
    that got furthest, and among those the one with the most measurements.
    """
    settings = [run.settings for run in runs]
    varying = [path for path in differing(settings) if makes_a_series(path)]
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, table in enumerate(settings):
        groups.setdefault(tuple(table.get(path) for path in varying), []).append(index)
    names = display_names({_optimizer(table) for table in settings})
    conditions = conditions_of(runs)
    distinguishing = distinguishing_conditions(conditions)
    all_series = []
    for members in groups.values():
        first, first_conditions = settings[members[0]], conditions[members[0]]
        rivals = [
            table
            for table, its_conditions in zip(settings, conditions, strict=True)
            if _optimizer(table) == _optimizer(first) and its_conditions == first_conditions
        ]
        within = [path for path in differing(rivals) if makes_a_series(path)]
        details = []
        for path in within:
            if path not in first:
                continue
            value = _show_among([table.get(path) for table in rivals], first.get(path))
            details.append(f"{path.removeprefix('optimizer.')} {value}")
        counted, repeats = _once([runs[index] for index in members])
        lr = first.get("optimizer.lr")
        all_series.append(
            Series(
                name=", ".join([names[_optimizer(first)], *details]),
                optimizer=_optimizer(first),
                lr=float(lr) if isinstance(lr, int | float) else None,
                runs=counted,
                repeats=repeats,
                conditions=first_conditions,
                distinguishing=tuple(first_conditions.known(distinguishing)),
            )
        )
    places = list(dict.fromkeys(conditions))
    return sorted(all_series, key=lambda series: (places.index(series.conditions), _order(series)))


def have_other_data(all_series: Iterable[Series]) -> bool:
    """Whether series are on different data, so that their tokens differ."""
    return len({run.fingerprint for series in all_series for run in series.runs}) > 1


def _once(runs: Sequence[MeasuredRun]) -> tuple[tuple[MeasuredRun, ...], tuple[MeasuredRun, ...]]:
    """Split runs that differ only in their seed into one for each seed, and the repeats."""
    counted: dict[object, MeasuredRun] = {}
    repeats = []
    for run in sorted(runs, key=lambda run: run.extent, reverse=True):
        seeds = tuple((path, value) for path, value in run.settings.items() if _is_seed(path))
        if counted.setdefault(seeds, run) is not run:
            repeats.append(run)

    def in_order(unsorted: Iterable[MeasuredRun]) -> tuple[MeasuredRun, ...]:
        return tuple(sorted(unsorted, key=lambda run: (run.seed, run.name)))

    return in_order(counted.values()), in_order(repeats)


def _show_among(values: Iterable[object], value: object) -> str:
    """A value formatted by ``show``, or in full if another of ``values`` would look the same."""
    alike = {repr(other) for other in values if show(other) == show(value)}
    return show(value) if len(alike) == 1 else repr(value)


def makes_a_series(path: str) -> bool:
    """Whether runs that differ in this setting are different series; measuring more often changes nothing."""
    group, _, name = path.partition(".")
    is_observation = group == "checkpoint" or (group == "measure" and name != "validation_sequences")
    return not is_observation and not _is_seed(path)


def _is_seed(path: str) -> bool:
    return path.rpartition(".")[2] == "seed"


def _optimizer(settings: Mapping[str, object]) -> str:
    return str(settings.get("optimizer.name", settings.get("optimizer", "unknown")))


def _order(series: Series) -> tuple[int, str, float, str]:
    known = list(DISPLAY_NAMES)
    place = known.index(series.optimizer) if series.optimizer in known else len(known)
    return place, series.optimizer, series.lr or 0.0, series.label
