"""What an entry of `merit reproduce` is: a figure, a table, or a question, as a row of data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from merit_lab.paper import drawing
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, Numbers
from merit_lab.paper.plan import Data, Runs
from merit_lab.paper.scales import Scale

losses = drawing.curves("Validation loss", drawing.LOSS, q.losses)
first_logit, middle_logit = (
    drawing.curves(f"Largest logit, {layer}", "largest attention logit", q.logits(layer), wide=True)
    for layer in ("first layer", "middle layer")
)
FIRST, MIDDLE, ALL = q.logit("first layer"), q.logit("middle layer"), q.logit("all layers")
LOSS = {"Validation loss": q.LOSS}
LOSS_AND_LOGIT = {**LOSS, "Largest logit": q.LARGEST_LOGIT}
LOSS_AND_STEPS = {**LOSS, "Steps to the target": q.STEPS}
WITH_BATCH = ("panel", "series", "batch", "lr")
THREE = ("AdamW", "LAMB", "MERIT")
FOUR, FIVE = ("adamw", "lamb", "maxlamb", "merit"), ("adamw", "lamb", "maxlamb", "merit", "lion")
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
        runs: which runs it needs; none if its rows are made up.
        claims: what is said of them.
        columns: of its table, after those of ``rows``: heads and quantities.
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
        runs: Sequence[Runs],
        *claims: Claim,
        columns: Mapping[str, q.Quantity] = LOSS,
        charts: Sequence[drawing.Draw] = (losses,),
        rows: Sequence[str] = ("panel", "series", "lr"),
        note: str = "",
        paper: Numbers | None = None,
        is_grid: bool = False,
        measure: Callable[[Data, Scale, Path | None], None] | None = None,
        made_up: Callable[[], Data] | None = None,
    ) -> None:
        self.name, self.shows, self.runs, self.claims = name, shows, runs, claims
        self.columns, self.charts, self.rows, self.note = columns, charts, rows, note
        self.paper, self.is_grid, self.measure, self.made_up = paper, is_grid, measure, made_up

    @property
    def of_paper(self) -> str:
        """What it is in the paper: "Figure 4"; empty if it is not there."""
        found = re.fullmatch(r"(fig|table|theorem)(\d+)", self.name)
        return f"{found[1].replace('fig', 'figure').capitalize()} {found[2]}" if found else ""

    @property
    def title(self) -> str:
        """Its heading: "Figure 4: validation loss on GPT-2"."""
        return f"{self.of_paper}: {self.shows}" if self.of_paper else self.shows[0].upper() + self.shows[1:]

    def num_seeds(self, scale: Scale, seeds: int | None) -> int:
        """The number of seeds: ``seeds``, or the scale's default if that is None."""
        return seeds or (scale.grid_seeds if self.is_grid else scale.seeds)
