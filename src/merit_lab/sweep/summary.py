"""The findings of a sweep as sentences and tables, computed from the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.results.tables import describe_runs
from merit_lab.runs.settings import show
from merit_lab.study.fields import LR, short
from merit_lab.sweep.carry import cost_of_keeping, exponent, lowest_value
from merit_lab.sweep.ledger import Best, Cell, Ledger, axis_name, best_of, is_number
from merit_lab.tables import NOTHING, Table
from merit_lab.text import count_seeds, join

_OTHER_SIDE = {"lowest": "lower", "highest": "higher"}


def summarise(ledger: Ledger) -> str:
    """State the best value of each optimizer, and the losses of its neighbours."""
    bests = [best for optimizer in ledger.optimizers if (best := ledger.best(optimizer))]
    if not bests:
        return "No run finished, so there is no best value."
    bests.sort(key=lambda best: best.cell.rank)
    if ledger.sizes:
        return " ".join(_carry_over(ledger, best.cell.optimizer) for best in bests)
    return "; ".join(_describe(ledger, best) for best in bests) + "."


def warnings(ledger: Ledger, *, may_grow: bool) -> list[str]:
    """Caveats about the best values. ``may_grow`` means that --extend was not given."""
    remarks = []
    for optimizer in ledger.optimizers:
        name = ledger.names[optimizer]
        for lines in ledger.groups(optimizer):
            where, best = _at_size(ledger, lines[0].cells[0]), best_of(lines)
            if best is None:
                remarks.append(
                    f"No run of {name} finished{where}, so it has no best value; see the table for reasons."
                )
                continue
            remarks += _at_edges(ledger, best, may_grow=may_grow)
            if best.cell.outcome.diverged:
                remarks.append(
                    f"{name} diverged with at least one seed at every value, including the best{where}."
                )
    unfinished = [run.name for cell in ledger.cells for run in cell.outcome.unfinished]
    if unfinished:
        remarks.append(
            f"{len(unfinished)} of the runs are not finished, and their values are not ranked: "
            f"{join(unfinished)}."
        )
    return remarks


def best_table(ledger: Ledger) -> Table:
    """A row for each optimizer and each model, batch or length: the best value between its neighbours."""
    names = [*(axis_name(field).capitalize() for field in ledger.others), f"Best {axis_name(ledger.axis)}"]
    names += ["By a parabola"] if ledger.sizes else []
    head = ("Optimizer", *names, "Loss", "Next lower", "Next higher", "Seeds")
    rows = []
    for optimizer in ledger.optimizers:
        bests = ledger.bests(optimizer)
        if not bests:
            rows.append((ledger.names[optimizer], *[NOTHING] * (len(head) - 1)))
        for best in bests:
            below, above = best.neighbours
            rows.append(
                (
                    ledger.names[optimizer],
                    *(show(best.cell.settings[field]) for field in ledger.others),
                    show(best.value),
                    *([_estimate(best)] if ledger.sizes else []),
                    best.loss.text(".3f"),
                    _neighbour(below, ledger.axis),
                    _neighbour(above, ledger.axis),
                    _seeds(best.cell),
                )
            )
    return Table(head, tuple(rows))


def cell_table(ledger: Ledger) -> Table:
    """One row for each point of the grid."""
    fields = list(dict.fromkeys((ledger.axis, LR, *ledger.fields)))
    bests = [best.cell for optimizer in ledger.optimizers for best in ledger.bests(optimizer)]
    rows = [
        (
            ledger.names[line.optimizer] + (" (best)" if cell in bests else ""),
            describe_runs(cell.outcome),
            *(show(cell.settings[field]) for field in fields),
            NOTHING if cell.loss is None else cell.loss.text(".3f"),
        )
        for line in ledger.lines
        for cell in line.cells
    ]
    names = [axis_name(field).capitalize() for field in fields]
    return Table(("Optimizer", "Runs", *names, "Validation loss"), tuple(rows), num_text=2)


def _describe(ledger: Ledger, best: Best) -> str:
    place = [f"a {axis_name(ledger.axis)} of {show(best.value)}"]
    place += [f"{axis_name(field)} {show(best.cell.settings[field])}" for field in ledger.others]
    around = [
        f"{_loss_or_status(cell)} at {show(cell.number(ledger.axis))}"
        for cell in best.neighbours
        if cell is not None
    ]
    remarks = [count_seeds(len(best.loss.values)), *([join(around)] if around else [])]
    return (
        f"{ledger.names[best.cell.optimizer]} was best at {join(place)}, with a validation loss of "
        f"{best.loss.text('.3f')} ({'; '.join(remarks)})"
    )


def _carry_over(ledger: Ledger, optimizer: str) -> str:
    """State an optimizer's best value for each model, batch or length, and whether one would do for all."""
    name, bests, axis = ledger.names[optimizer], ledger.bests(optimizer), axis_name(ledger.axis)
    found = [
        f"{show(best.value)}{_at_size(ledger, best.cell)} (loss {best.loss.text('.3f')})" for best in bests
    ]
    said = [f"{name}'s best {axis} was {join(found)}."]
    first, last = bests[0], bests[-1]
    if first.value != last.value and (cost := cost_of_keeping(first, last)) is not None:
        price = f"ends {cost:.3f} above it" if math.isfinite(cost) else "diverges"
        said.append(f"The first of these {price}{_at_size(ledger, last.cell)}.")
    if len(ledger.sizes) == 1 and (power := exponent(bests, ledger.sizes[0])) is not None:
        said.append(
            f"Between the values that were tried the best goes about as {short(ledger.sizes[0])}^{power:.2f}."
        )
    return " ".join(said)


def _at_size(ledger: Ledger, cell: Cell) -> str:
    """Which model, batch or length a cell is of; empty if the sweep has one."""
    named = [(axis_name(field), show(cell.settings[field])) for field in ledger.sizes]
    sizes = [f"{value} {name}" if name.endswith("s") else f"{name} {value}" for name, value in named]
    return f" at {join(sizes)}" if sizes else ""  # "at width 64 and 200 steps"


def _estimate(best: Best) -> str:
    rate = lowest_value(best)
    return NOTHING if rate is None else f"{rate:.3g}"


def _loss_or_status(cell: Cell) -> str:
    """The loss of a cell, or why it has none."""
    if cell.outcome.diverged:
        return "diverged"
    return "unfinished" if not cell.is_done or cell.loss is None else f"{cell.loss.mean:.3f}"


def _seeds(cell: Cell) -> str:
    num_diverged = len(cell.outcome.diverged)
    return f"{len(cell.outcome.finished)}" + (f", {num_diverged} diverged" if num_diverged else "")


def _neighbour(cell: Cell | None, axis: str) -> str:
    return "none tried" if cell is None else f"{_loss_or_status(cell)} at {show(cell.number(axis))}"


def _at_edges(ledger: Ledger, best: Best, *, may_grow: bool) -> list[str]:
    """A sentence for each axis on which the best cell lies at the edge."""
    remarks = []
    name, axis = ledger.names[best.cell.optimizer], axis_name(ledger.axis)
    where = _at_size(ledger, best.cell)
    if best.edge == "only":
        remarks.append(
            f"{name} was tried at only one {axis}{where}, {show(best.value)}: others may be better."
        )
    elif best.edge is not None:
        rest = ""
        if ledger.axis == LR:
            rest = " Extend the grid with --extend." if may_grow else " The grid was not extended further."
        remarks.append(
            f"{name}'s best {axis}{where}, {show(best.value)}, is the {best.edge} that was tried: a "
            f"{_OTHER_SIDE[best.edge]} one may be better.{rest}"
        )
    for field in ledger.fields:
        values = _tried(ledger, best.cell.optimizer, field)
        if field in (ledger.axis, *ledger.sizes) or len(values) < 3:
            continue  # two values are both at an edge
        value = best.cell.number(field)
        if value in (min(values), max(values)):
            edge = "lowest" if value == min(values) else "highest"
            remarks.append(
                f"{name}'s best {axis_name(field)}, {show(value)}, is the {edge} that was tried: a "
                f"{_OTHER_SIDE[edge]} one may be better."
            )
    return remarks


def _tried(ledger: Ledger, optimizer: str, field: str) -> Sequence[float]:
    """The values of a field at which an optimizer was tried; empty if they are not numbers."""
    values = {cell.settings[field] for cell in ledger.cells if cell.optimizer == optimizer}
    return [float(value) for value in values if is_number(value)] if all(map(is_number, values)) else []
