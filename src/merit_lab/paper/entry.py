"""What an entry of `merit reproduce` is: a figure, a table, or a question, as a row of data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from merit_lab.paper import drawing
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, Numbers
from merit_lab.paper.plan import Runs
from merit_lab.paper.records import Data
from merit_lab.paper.scales import Scale

losses = drawing.curves("Validation loss", drawing.LOSS, q.losses)
first_logit, middle_logit = (
    drawing.curves(f"Largest logit, {layer}", "largest attention logit", q.logits(layer), wide=True)
    for layer in ("first layer", "middle layer")
)
WITH_BATCH = ("model", "series", "batch", "lr")
THREE = ("AdamW", "LAMB", "MERIT")
FOUR, FIVE = (
    ("adamw", "lamb-uncorrected", "maxlamb", "merit"),
    ("adamw", "lamb-uncorrected", "maxlamb", "merit", "lion"),
)
GRID = (0.5, 1.0, 2.0)
REFERENCE = "AdamW, small batch"

# Notes of several entries.
MERITS_RATE = "All variants have MERIT's learning rate."
MORE = "Holds is more than the claim: MERIT is better. Does not hold: it is worse."
LARGEST = (
    "Compared is the largest logit that a layer had at any step, over several layers the mean of theirs. A "
    "run that diverged counts as worse than any other, whatever its logits were."
)
INSIDE = (
    "A seed's best rate counts only if it lies inside the grid, with a worse one on each side: each "
    "optimizer has a separate grid, so a best rate on the edge depends on where the grid was placed. The "
    "other entries use the rate in the middle of each grid."
)
TARGET = (
    "The target is the lowest validation loss that every run ended at or below, without those that "
    "diverged. Each model has its own. All runs have the same number of tokens; learning rates scale with "
    "the square root of the batch."
)


class Entry:
    """A figure, a table, or a question.

    Args:
        name: as `merit reproduce` takes it.
        shows: what it shows, in a few words.
        parts: which runs it needs, none if its rows are made up; and what is claimed of them.
        columns: of its table, after those of ``rows``.
        charts: what is drawn of the runs.
        rows: what its table has a row for.
        note: what to know of it.
        paper: the paper's numbers that its table shows.
        is_grid: whether it has many runs, so that it uses the scale's ``grid_seeds``.
        measure: measures what is missing after training; the last argument is the folder of evaluation sets.
        made_up: gives rows that need no training.
    """

    def __init__(
        self,
        name: str,
        shows: str,
        *parts: Runs | Claim,
        columns: Sequence[q.Quantity] = (q.LOSS,),
        charts: Sequence[drawing.Draw] = (losses,),
        rows: Sequence[str] = ("panel", "series", "lr"),
        note: str = "",
        paper: Numbers | None = None,
        is_grid: bool = False,
        measure: Callable[[Data, Scale, Path | None], None] | None = None,
        made_up: Callable[[], Data] | None = None,
    ) -> None:
        self.name, self.shows = name, shows
        self.runs = [part for part in parts if isinstance(part, Runs)]
        self.claims = [part for part in parts if isinstance(part, Claim)]
        self.columns, self.charts, self.rows, self.note = columns, charts, rows, note
        self.paper, self.is_grid, self.measure, self.made_up = paper or {}, is_grid, measure, made_up

    @property
    def of_paper(self) -> str:
        """What it is in the paper: "Figure 4"; empty if it is not there."""
        found = re.fullmatch(r"(fig|table|theorem)(\d+)", self.name)
        return f"{found[1].replace('fig', 'figure').capitalize()} {found[2]}" if found else ""

    @property
    def title(self) -> str:
        """Its heading: "Figure 4: validation loss on GPT-2"."""
        return f"{self.of_paper}: {self.shows}" if self.of_paper else self.shows[0].upper() + self.shows[1:]

    @property
    def source(self) -> str:
        """Where its claims are from, unless they say it."""
        return self.of_paper.lower() or "ours, not the paper's"

    def num_seeds(self, scale: Scale) -> int:
        """The number of seeds at a scale."""
        return scale.grid_seeds if self.is_grid else scale.seeds
