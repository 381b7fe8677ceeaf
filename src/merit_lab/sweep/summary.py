"""What a sweep found, in words and in rows: everything follows from the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from merit_lab.report.gather import show
from merit_lab.report.outcome import Spread
from merit_lab.report.summary import count_seeds, join
from merit_lab.report.tables import NOTHING, Table, describe_runs
from merit_lab.study.fields import LR, short
from merit_lab.sweep.ledger import Best, Cell, Ledger, is_number

_OTHER_SIDE = {"lowest": "lower", "highest": "higher"}


def summarise(ledger: Ledger) -> str:
    """Say at which value each optimizer was best, and how its neighbours did."""
    bests = [best for optimizer in ledger.optimizers if (best := ledger.best(optimizer))]
    if not bests:
        return "No run finished, so there is no best value."
    bests.sort(key=lambda best: best.cell.rank)
    return "; ".join(_describe(ledger, best) for best in bests) + "."


def warnings(ledger: Ledger, *, may_grow: bool) -> list[str]:
    """What a reader must know before using the best values. ``may_grow``: --extend was not given."""
    found = []
    for optimizer in ledger.optimizers:
        name, best = ledger.names[optimizer], ledger.best(optimizer)
        if best is None:
            found.append(f"No run of {name} finished, so it has no best value; the table has the reasons.")
            continue
        found += _at_edges(ledger, best, may_grow=may_grow)
        if best.cell.outcome.diverged:
            found.append(f"{name} diverged with some seed wherever it was tried, at its best value too.")
    unfinished = [run.name for cell in ledger.cells for run in cell.outcome.unfinished]
    if unfinished:
        found.append(
            f"{len(unfinished)} of the runs are not finished, and the values they belong to are not ranked: "
            f"{join(unfinished)}."
        )
    return found


def best_table(ledger: Ledger) -> Table:
    """One row for each optimizer: its best value between its neighbours."""
    rows = []
    for optimizer in ledger.optimizers:
        best = ledger.best(optimizer)
        if best is None:
            rows.append((ledger.names[optimizer], *[NOTHING] * (len(ledger.others) + 5)))
            continue
        below, above = best.neighbours
        rows.append(
            (
                ledger.names[optimizer],
                *(show(best.cell.settings[field]) for field in ledger.others),
                show(best.value),
                write_loss(best.loss),
                _neighbour(below, ledger.axis),
                _neighbour(above, ledger.axis),
                _seeds(best.cell),
            )
        )
    names = [*(axis_name(field).capitalize() for field in ledger.others), f"Best {axis_name(ledger.axis)}"]
    head = ("Optimizer", *names, "Loss", "Next lower", "Next higher", "Seeds")
    return Table(head, tuple(rows))


def cell_table(ledger: Ledger) -> Table:
    """One row for each point of the grid."""
    fields = list(dict.fromkeys((ledger.axis, LR, *ledger.fields)))
    bests = [best.cell for optimizer in ledger.optimizers if (best := ledger.best(optimizer))]
    rows = [
        (
            ledger.names[line.optimizer] + (" (best)" if cell in bests else ""),
            describe_runs(cell.outcome),
            *(show(cell.settings[field]) for field in fields),
            NOTHING if cell.loss is None else write_loss(cell.loss),
        )
        for line in ledger.lines
        for cell in line.cells
    ]
    names = [axis_name(field).capitalize() for field in fields]
    return Table(("Optimizer", "Runs", *names, "Validation loss"), tuple(rows), num_text=2)


def axis_name(field: str) -> str:
    """A field's name as it is read."""
    return "learning rate" if field == LR else short(field).replace("_", " ")


def write_loss(loss: Spread) -> str:
    """A mean loss, with the standard deviation where there are several seeds."""
    deviation = "" if loss.deviation is None else f" ± {loss.deviation:.3f}"
    return f"{loss.mean:.3f}{deviation}"


def _describe(ledger: Ledger, best: Best) -> str:
    place = [f"a {axis_name(ledger.axis)} of {show(best.value)}"]
    place += [f"{axis_name(field)} {show(best.cell.settings[field])}" for field in ledger.others]
    around = [
        f"{_told(cell)} at {show(cell.number(ledger.axis))}" for cell in best.neighbours if cell is not None
    ]
    remarks = [count_seeds(len(best.loss.values)), *([join(around)] if around else [])]
    return (
        f"{ledger.names[best.cell.optimizer]} was best at {join(place)}, with a validation loss of "
        f"{write_loss(best.loss)} ({'; '.join(remarks)})"
    )


def _told(cell: Cell) -> str:
    """A neighbour in few words: its loss, or what became of it."""
    if cell.outcome.diverged:
        return "diverged"
    return "unfinished" if not cell.is_done or cell.loss is None else f"{cell.loss.mean:.3f}"


def _seeds(cell: Cell) -> str:
    num_diverged = len(cell.outcome.diverged)
    return f"{len(cell.outcome.finished)}" + (f", {num_diverged} diverged" if num_diverged else "")


def _neighbour(cell: Cell | None, axis: str) -> str:
    return "none tried" if cell is None else f"{_told(cell)} at {show(cell.number(axis))}"


def _at_edges(ledger: Ledger, best: Best, *, may_grow: bool) -> list[str]:
    """A sentence for each axis on which the best has no neighbour on one side."""
    found = []
    name, axis = ledger.names[best.cell.optimizer], axis_name(ledger.axis)
    if best.edge == "only":
        found.append(f"{name} was tried at one {axis} alone, {show(best.value)}: others may be better.")
    elif best.edge is not None:
        rest = ""
        if ledger.axis == LR:
            rest = " --extend goes on there." if may_grow else " The grid was not extended any further."
        found.append(
            f"{name}'s best {axis}, {show(best.value)}, is the {best.edge} that was tried: a "
            f"{_OTHER_SIDE[best.edge]} one may be better.{rest}"
        )
    for field in ledger.fields:
        values = _tried(ledger, best.cell.optimizer, field)
        if field == ledger.axis or len(values) < 3:
            continue  # of two values one is at each edge
        value = best.cell.number(field)
        if value in (min(values), max(values)):
            edge = "lowest" if value == min(values) else "highest"
            found.append(
                f"{name}'s best {axis_name(field)}, {show(value)}, is the {edge} that was tried: a "
                f"{_OTHER_SIDE[edge]} one may be better."
            )
    return found


def _tried(ledger: Ledger, optimizer: str, field: str) -> Sequence[float]:
    """The numbers an optimizer was tried at; none where the field holds something else."""
    values = {cell.settings[field] for cell in ledger.cells if cell.optimizer == optimizer}
    return [float(value) for value in values if is_number(value)] if all(map(is_number, values)) else []
