"""Writes the tables of README.md, docs/results.md and docs/results/ from the records under results/.

    python docs/scripts/evidence.py

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`; TABLES has the function of each name.
The pictures are drawn from the same runs. tests/test_results.py fails where a page or a picture differs
from what the records give.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import evidence_large as large
import evidence_small as small
from evidence_runs import (
    BATCHES,
    CONTESTANTS,
    ROOT,
    SCALED,
    SeedRuns,
    at_papers_batch,
    best_at,
    lowest,
    tuned_series,
)

from merit_lab.results import group
from merit_lab.results.figures import make_figures
from merit_lab.results.gather import DISPLAY_NAMES
from merit_lab.results.old_charts import write_svg
from merit_lab.study.charts import Axis, line_chart
from merit_lab.study.page import FILE_WIDTH
from merit_lab.tables import Table

DETAILS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/results/*.md"))
PAGES = ("README.md", "docs/results.md", *DETAILS)
PICTURES = ROOT / "docs/images"
TABLES: dict[str, Callable[[], Table]] = {
    "headline": large.headline,
    "tuned": large.tuned,
    "tuned-settings": large.tuned_settings,
    "budgets": large.budgets,
    "batches": large.batches,
    "critical": small.critical,
    "critical-10m": small.critical_10m,
    "largest": large.largest,
    "entropies": large.entropies,
    "longer": large.longer,
    "longer-98m": large.longer_98m,
    "bounds": large.bounds,
    "small-bounds": small.small_bounds,
    "parts": large.parts,
    "equal-rows": small.equal_rows,
    "equal-rows-large": large.equal_rows_large,
    "decays": small.decays,
    "soap-later": small.soap_later,
    "zero-shot": large.zero_shot,
    "rates": large.rates,
    "sizes": small.sizes,
    "sizes-rows": small.sizes_rows,
    "drift": small.drift,
    "advised": large.advised,
    "cost": large.cost,
    "rest": small.rest,
    "rest-grid": small.rest_grid,
}


def with_tables(text: str) -> str:
    """A page with the tables that the records give."""

    def table(block: re.Match[str]) -> str:
        return f"{block[1]}\n{TABLES[block[2]]().markdown()}\n{block[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", table, text, flags=re.DOTALL)


def draw_losses(path: Path) -> None:
    """The loss over the steps at 33M, of each optimizer at its best."""
    chosen = [lowest(tuned_series(512, name)) for name in CONTESTANTS if name != "normuon"]
    _draw_losses(path, chosen, "Validation loss at 33M parameters, batches of 512 sequences")


def draw_papers_batch(path: Path) -> None:
    """The loss over the steps of GPT-2 small at the paper's batch."""
    chosen = map(at_papers_batch, CONTESTANTS)
    _draw_losses(path, chosen, "Validation loss of GPT-2 small, batches of 1024 sequences of 1024 tokens")


def _draw_losses(path: Path, chosen: Iterable[SeedRuns | None], title: str) -> None:
    figures = make_figures(group([run for one in chosen if one for run in one.runs]))
    figure = next(figure for figure in figures if figure.key == "validation-loss")
    write_svg(path, {**figure.in_files[figure.key], "datasets": figure.datasets}, title)


def draw_batches(path: Path) -> None:
    """The loss at 10M after as many tokens, against the batch."""
    chosen = {name: [(batch, best_at(batch, name)) for batch in BATCHES] for name in SCALED}
    lines = {
        DISPLAY_NAMES[name]: [(name, [(float(batch), one.mean) for batch, one in points if one], False)]
        for name, points in chosen.items()
    }
    chart = line_chart(
        lines,
        {DISPLAY_NAMES[name]: name for name in SCALED},
        Axis("sequences in a batch", format="d", logarithmic=True, ticks=tuple(map(float, BATCHES))),
        Axis("validation loss", format=".1f"),
        name=path.stem,
        title="Validation loss after 52M tokens at 10M parameters",
        caption="",
    )
    write_svg(path, {"width": FILE_WIDTH, **chart.spec}, chart.title)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "large-batch.svg": draw_losses,
    "papers-batch.svg": draw_papers_batch,
    "batches.svg": draw_batches,
}


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
    for name, draw in DRAWINGS.items():
        draw(PICTURES / name)
