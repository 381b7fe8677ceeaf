"""The results of a sweep, read from the run directories: cells, lines of cells, and the best cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeGuard

from merit_lab.results import find_runs, group, read_outcomes
from merit_lab.results.gather import display_names
from merit_lab.results.outcome import SeriesOutcome, Spread
from merit_lab.runs.settings import flatten, show
from merit_lab.study.fields import LR, short, value_of
from merit_lab.train import TrainConfig

Edge = Literal["lowest", "highest", "only"]


@dataclass(frozen=True)
class Cell:
    """A point of the grid: runs that differ only in their seed. ``fields`` are those that the grid varies."""

    outcome: SeriesOutcome
    fields: tuple[str, ...] = ()

    @property
    def optimizer(self) -> str:
        return self.outcome.series.optimizer

    @cached_property
    def config(self) -> TrainConfig:
        """The configuration of its first run; the others differ only in the seed."""
        return TrainConfig.from_dict(dict(self.outcome.series.runs[0].config))

    @cached_property
    def settings(self) -> dict[str, object]:
        """The configuration by dotted name, with the values of varied fields that it does not set."""
        varied = {field: value_of(self.config, field) for field in self.fields}
        return flatten(self.config.to_dict()) | varied

    def number(self, field: str) -> float:
        """The value of a field that holds a number."""
        value = self.settings[field]
        assert isinstance(value, int | float), f"{field} is {value!r}"
        return float(value)

    @property
    def loss(self) -> Spread | None:
        """The final validation loss of its finished runs; None if there are none."""
        return self.outcome.spread("validation_loss")

    @property
    def whole_loss(self) -> Spread | None:
        """The final validation loss if every seed finished; None otherwise."""
        return self.loss if self.is_done and not self.outcome.diverged else None

    @property
    def is_done(self) -> bool:
        """Whether all its runs finished or diverged."""
        return not self.outcome.unfinished

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, the best first: the share of diverged seeds, then the mean loss."""
        assert self.loss is not None
        return len(self.outcome.diverged) / len(self.outcome.runs), self.loss.mean


@dataclass(frozen=True)
class Line:
    """Cells that differ along one axis of the grid only, in ascending order."""

    label: str
    optimizer: str
    axis: str
    cells: tuple[Cell, ...]

    @property
    def values(self) -> list[float]:
        """The values of its cells on the axis."""
        return [cell.number(self.axis) for cell in self.cells]


@dataclass(frozen=True)
class Best:
    """The best cell of an optimizer, and the line it is on."""

    line: Line
    cell: Cell

    @property
    def value(self) -> float:
        """Its value on the line's axis."""
        return self.cell.number(self.line.axis)

    @property
    def loss(self) -> Spread:
        """Its validation loss."""
        assert self.cell.loss is not None
        return self.cell.loss

    @property
    def neighbours(self) -> tuple[Cell | None, Cell | None]:
        """The next cells below and above it."""
        cells, place = self.line.cells, self.line.cells.index(self.cell)
        return (
            cells[place - 1] if place > 0 else None,
            cells[place + 1] if place + 1 < len(cells) else None,
        )

    @property
    def edge(self) -> Edge | None:
        """The end of the line at which it lies; None inside."""
        below, above = self.neighbours
        if below is None and above is None:
            return "only"
        return "lowest" if below is None else "highest" if above is None else None


@dataclass(frozen=True)
class Ledger:
    """All runs of a sweep, in cells. ``fields`` are those that it varies besides the learning rate."""

    cells: tuple[Cell, ...]
    fields: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, fields: Sequence[str]) -> Ledger:
        """Read the runs in a folder."""
        outcomes = read_outcomes(group(find_runs([folder])))
        return cls(tuple(Cell(outcome, tuple(fields)) for outcome in outcomes), tuple(fields))

    @property
    def optimizers(self) -> list[str]:
        """In the order of reports."""
        return list(dict.fromkeys(cell.optimizer for cell in self.cells))

    @cached_property
    def names(self) -> dict[str, str]:
        """The display name of each optimizer."""
        return display_names(self.optimizers)

    @property
    def varying(self) -> list[str]:
        """The fields that have more than one value, the learning rate first."""
        return [field for field in (LR, *self.fields) if len(self._values(field)) > 1]

    @cached_property
    def axis(self) -> str:
        """The field along lines: the learning rate, or the first numeric field if that is not varied."""
        numbers = [field for field in self.varying if all(map(is_number, self._values(field)))]
        per_optimizer = {(cell.optimizer, cell.settings[LR]) for cell in self.cells}
        if len(per_optimizer) == len(self.optimizers) and LR in numbers:
            numbers.remove(LR)  # it differs between optimizers, but none was tried at two rates
        return numbers[0] if numbers else LR

    @property
    def others(self) -> list[str]:
        """The fields that have more than one value, except the axis and the learning rate."""
        return [field for field in self.varying if field not in (self.axis, LR)]

    @property
    def sizes(self) -> list[str]:
        """The sizes among the others: numbers that are not the optimizer's, as a width, a batch or a length.

        A best learning rate is sought for each of them: which of them ends lowest is no question.
        """
        return [
            field
            for field in self.others
            if not field.startswith("optimizer.") and all(map(is_number, self._values(field)))
        ]

    @cached_property
    def lines(self) -> list[Line]:
        """Every line of the grid, by optimizer, and in ascending order of the other fields."""
        across = [field for field in (LR, *self.fields) if field != self.axis]
        groups: dict[tuple[object, ...], list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault((cell.optimizer, *(cell.settings[field] for field in across)), []).append(cell)
        lines = []
        for cells in groups.values():
            first = cells[0]
            others = [f"{axis_name(field)} {show(first.settings[field])}" for field in self.others]
            label = ", ".join([self.names[first.optimizer], *others])
            ordered = sorted(cells, key=lambda cell: cell.number(self.axis))
            lines.append(Line(label, first.optimizer, self.axis, tuple(ordered)))
        return sorted(lines, key=self._place)

    def _place(self, line: Line) -> tuple[int, list[float]]:
        """Where a line stands: by the numbers among its values, otherwise as it was found."""
        values = [line.cells[0].settings[field] for field in self.others]
        return self.optimizers.index(line.optimizer), [v if is_number(v) else 0.0 for v in values]

    def groups(self, optimizer: str) -> list[list[Line]]:
        """The lines of an optimizer, those with the same sizes together."""
        groups: dict[tuple[float, ...], list[Line]] = {}
        for line in self.lines:
            if line.optimizer == optimizer:
                values = tuple(line.cells[0].number(field) for field in self.sizes)
                groups.setdefault(values, []).append(line)
        return list(groups.values())

    def bests(self, optimizer: str) -> list[Best]:
        """The best of an optimizer's cells for each combination of sizes, where a run finished."""
        found = (best_of(lines) for lines in self.groups(optimizer))
        return [best for best in found if best is not None]

    def best(self, optimizer: str) -> Best | None:
        """The best of an optimizer's cells that are done; None if no run in them finished."""
        return min(self.bests(optimizer), key=lambda best: best.cell.rank, default=None)

    def _values(self, field: str) -> list[object]:
        return list(dict.fromkeys(cell.settings[field] for cell in self.cells))


def axis_name(field: str) -> str:
    """The display name of a field."""
    return "learning rate" if field == LR else short(field).replace("_", " ")


def best_of(lines: Iterable[Line]) -> Best | None:
    """The best of the cells that are done; None if no run in them finished."""
    candidates = [
        Best(line, cell) for line in lines for cell in line.cells if cell.is_done and cell.loss is not None
    ]
    return min(candidates, key=lambda best: best.cell.rank, default=None)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value can be shown on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)
