"""Signs of trouble in runs whose losses look right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merit_lab.results.gather import MeasuredRun
from merit_lab.text import join

# As a share of the entropy at the first measurement. Hardly a run that ended below it was near the best
# of its optimizer and size, and most were far above (docs/results/learning-rates.md).
_COLLAPSED = 0.25


def warnings(runs: Mapping[str, Sequence[MeasuredRun]]) -> list[str]:
    """Return what a reader should know before trusting runs, which are given by the label to call them by."""
    collapsed = [
        f"from {first:.2g} to {last:.2g} nats with {label}"
        for label, alike in runs.items()
        for first, last in _collapsed(alike)[:1]
    ]
    text = (
        f"the attention entropy fell {join(collapsed)}: heads attend to few tokens, as they do where the "
        "learning rate is too high; try a lower one"
    )
    return [text] if collapsed else []


def _collapsed(runs: Sequence[MeasuredRun]) -> list[tuple[float, float]]:
    """The first and the last entropy of runs that lost most of it, the lowest first."""
    measured = [run.points("entropy_mean") for run in runs]
    ends = [(points[0][1], points[-1][1]) for points in measured if len(points) > 1]
    return sorted((end for end in ends if end[1] < _COLLAPSED * end[0]), key=lambda end: end[1])
