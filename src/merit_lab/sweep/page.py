"""The page of a sweep: the loss against the learning rate, the best values, and all values."""

from __future__ import annotations

from typing import Any

from merit_lab.results.tables import settings
from merit_lab.runs.settings import show
from merit_lab.study.fields import LR, option_of, train_option
from merit_lab.study.page import JsonFile, Page, TableSection
from merit_lab.sweep import summary
from merit_lab.sweep.charts import make_chart
from merit_lab.sweep.ledger import Best, Ledger, axis_name


def make_page(ledger: Ledger, *, may_grow: bool) -> Page:
    """Return the page of a ledger; ``may_grow`` means that --extend was not given."""
    best = TableSection(
        "Best values",
        "Chosen by the mean final validation loss over seeds; values at which a seed diverged rank below all "
        "others. Loss in nats per token, ± the standard deviation over seeds.",
        summary.best_table(ledger),
    )
    return Page(
        title=f"{axis_name(ledger.axis).capitalize()} sweep",
        facts=_facts(ledger),
        summary=summary.summarise(ledger),
        warnings=summary.warnings(ledger, may_grow=may_grow),
        charts=[make_chart(ledger)],
        tables=[
            best,
            TableSection("Every value", "Means over the finished runs.", summary.cell_table(ledger)),
        ],
        settings=settings([cell.outcome.series for cell in ledger.cells]).common,
        printed=[best],
        rows=_rows(ledger),
        record=JsonFile("best.json", "the best configuration of each optimizer", _bests(ledger)),
    )


def _facts(ledger: Ledger) -> list[str]:
    num_runs = sum(len(cell.outcome.runs) for cell in ledger.cells)
    varied = [axis_name(field) for field in ledger.varying] or ["nothing"]
    return [", ".join(ledger.names.values()), f"varied: {', '.join(varied)}", f"{num_runs} runs"]


def _rows(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "optimizer": cell.optimizer,
            "lr": cell.settings[LR],
            **{field: show(cell.settings[field]) for field in ledger.fields},
            "seed": run.seed,
            "status": run.status,
            "step": run.step,
            "validation_loss": run.validation_loss,
            "run": run.name,
        }
        for line in ledger.lines
        for cell in line.cells
        for run in cell.outcome.runs
    ]


def _bests(ledger: Ledger) -> dict[str, Any]:
    """The best of each optimizer; a list of them, one for each model, batch or length, where these vary."""
    bests = {name: [_best(ledger, best) for best in ledger.bests(name)] for name in ledger.optimizers}
    return {name: each if ledger.sizes else each[0] for name, each in bests.items() if each}


def _best(ledger: Ledger, best: Best) -> dict[str, Any]:
    """The best cell for programs: its loss, options for `merit train`, and the full configuration."""
    cell, lr = best.cell, best.cell.number(LR)
    fields = [path[0] if (path := option_of(field)) else field for field in ledger.fields]
    values = {field: cell.settings[field] for field in ("optimizer.name", LR, *fields)}
    return {
        "lr": lr,
        "validation_loss": best.loss.mean,
        "validation_loss_by_seed": {run.seed: run.validation_loss for run in cell.outcome.finished},
        "num_diverged": len(cell.outcome.diverged),
        "edge": best.edge,
        "neighbours": [
            None
            if neighbour is None
            else {
                best.line.axis: neighbour.number(best.line.axis),
                "validation_loss": None if neighbour.loss is None else neighbour.loss.mean,
            }
            for neighbour in best.neighbours
        ],
        "train_options": [text for field, value in values.items() for text in train_option(field, value)],
        "compare_options": ["--lr", f"{cell.optimizer}={lr:g}"],
        "config": cell.config.to_dict(),
    }
