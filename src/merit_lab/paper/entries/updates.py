"""Statistics of updates: figures 13 and 15, and how far a step goes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

import torch

from merit_lab.models import AnyModelConfig, build
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import Scale, Setup
from merit_lab.paper.verdict import ALL_DIVERGED, Verdict, paired
from merit_lab.results.curves import Point, finite
from merit_lab.study.charts import Axis, Chart, line_chart
from merit_lab.tables import Table

_BLOCK = re.compile(r"blocks\.(\d+)\.")
_SHARE = ".3~p"


@cache
def _sizes(config: AnyModelConfig) -> dict[str, int]:
    """The number of elements of each parameter."""
    with torch.device("meta"):
        model = build(config)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def _layer_of(name: str) -> int | None:
    match = _BLOCK.search(name)
    return int(match[1]) + 1 if match else None


def clipped(record: TrialRecord, layer: int) -> list[Point]:
    """The share of a layer's elements that were clipped, over steps."""
    return _share_curve(record, "clipped", lambda name: _layer_of(name) == layer)


def bounded(record: TrialRecord) -> list[Point]:
    """The share of matrix elements where the weight-wise bound decided; vectors have no other ratio."""
    sizes, width = _sizes(record.config.model), record.config.model.width
    return _share_curve(record, "bounded", lambda name: sizes[name] > width)


def reach(record: TrialRecord) -> list[Point]:
    """The relative change of the blocks' matrices in a step, as a multiple of the learning rate."""
    sizes, width = _sizes(record.config.model), record.config.model.width
    changes = _share_curve(
        record, "relative_change", lambda name: sizes[name] > width and _layer_of(name) is not None
    )
    return [(step, change / _rate_of(record, step)) for step, change in changes]


def _rate_of(record: TrialRecord, step: int) -> float:
    """The learning rate at a step, counted from 1."""
    steps, optimizer = record.config.steps, record.config.optimizer
    assert steps is not None and optimizer.lr is not None, "the configuration is resolved"
    return optimizer.rate(step - 1, steps, optimizer.lr)


def _share_curve(record: TrialRecord, quantity: str, wanted: Callable[[str], bool]) -> list[Point]:
    sizes = _sizes(record.config.model)
    points = []
    for row in record.run.rows.get("update", []) if record.run else []:
        chosen = {
            name: statistics[quantity] for name, statistics in row["parameters"].items() if wanted(name)
        }
        total = sum(sizes[name] for name in chosen)
        if total:
            share = sum(sizes[name] * value for name, value in chosen.items()) / total
            points.append((row["step"], share))
    return finite(points)  # the last update of a run that diverged may not be


def _fig13_setup(scale: Scale) -> Setup:
    return scale.gpt2[0]


def _fig13(records: Records, scale: Scale) -> Analysis:
    num_layers = _fig13_setup(scale).model.layers
    layers = {"First layer": 1, "Middle layer": num_layers // 2 or 1, "Last layer": num_layers}

    def peak(place: str) -> BySeed:
        return records.by_seed(
            lambda record: max((value for _, value in clipped(record, layers[place])), default=None),
            diverged=math.nan,
        )

    def percent(place: str) -> BySeed:
        return {seed: 100 * share for seed, share in peak(place).items()}

    papers = {"First layer": "near 0", "Middle layer": "12%", "Last layer": "0.25%"}
    claim = Verdict(
        claim="The clip acts in the middle layers; in the first and the last layer it hardly ever does.",
        source="figure 13",
        comparisons=tuple(
            paired(
                f"{place.lower()} below middle layer, highest share clipped",
                percent(place),
                percent("Middle layer"),
                paper=f"{papers[place]} against {papers['Middle layer']}",
                unit="percent",
                empty_reason=ALL_DIVERGED,
            )
            for place in ("First layer", "Last layer")
        ),
    )
    table = Table(
        ("Layer", "Runs", "Paper, highest share", "Ours, highest share"),
        tuple(
            (f"{place} ({layer})", records.statuses, papers[place], spread_text(peak(place), ".3%"))
            for place, layer in layers.items()
        ),
        num_text=2,
    )
    chart = line_chart(
        {
            place: records.lines(lambda record, layer=layer: clipped(record, layer))  # type: ignore[misc]
            for place, layer in layers.items()
        },
        {},
        Axis("steps", ",d", from_zero=True),
        Axis("share of elements clipped", _SHARE, from_zero=True),
        name="clipped",
        title="Share of clipped elements",
        caption="Elements of a layer whose scaled update exceeded the clip.",
    )
    return Analysis(table=table, charts=(chart,), verdicts=(claim,))


def _third(points: list[Point], last: bool) -> float | None:
    """The mean over the first or the last third of the points."""
    length = len(points) // 3
    if not length:
        return None
    part = points[-length:] if last else points[:length]
    return sum(value for _, value in part) / length


def _fig15(records: Records, scale: Scale) -> Analysis:
    def share(last: bool) -> BySeed:
        return records.by_seed(lambda record: _third(bounded(record), last), diverged=math.nan)

    rises = paired(
        "first third below last third of the run",
        share(last=False),
        share(last=True),
        empty_reason=ALL_DIVERGED,
    )
    claim = Verdict(
        claim="The weight-wise bound decides for more elements late in training than early.",
        source="figure 15",
        comparisons=(rises,),
    )
    table = Table(
        ("Model", "Runs", "Share in the first third", "Share in the last third"),
        (
            (
                scale.observed.name,
                records.statuses,
                spread_text(share(last=False), ".2%"),
                spread_text(share(last=True), ".2%"),
            ),
        ),
        num_text=2,
    )
    chart = line_chart(
        {"MERIT": records.lines(bounded)},
        {"MERIT": "merit"},
        Axis("steps", ",d", from_zero=True),
        Axis("share of elements bounded", _SHARE, from_zero=True),
        name="bounded",
        title="Share of elements where the weight-wise bound decided",
        caption="Over all matrices of the model.",
    )
    return Analysis(table=table, charts=(chart,), verdicts=(claim,))


def _reach(records: Records, _: Scale) -> Analysis:
    def at(panel: str, series: str, place: int) -> BySeed:
        def value(record: TrialRecord) -> float | None:
            points = reach(record)
            return points[place][1] if points else None

        return records.of(panel=panel, series=series).by_seed(value, diverged=math.nan)

    claim = Verdict(
        claim="For their learning rate, steps of MERIT and maxLAMB go further at the beginning than at the "
        "end: while all elements of an update are alike, the largest is a poor measure of it.",
        source="ours, not the paper's",
        comparisons=tuple(
            paired(
                f"{series}'s last step below its first{records.panel_suffix(panel)}",
                at(panel, series, -1),
                at(panel, series, 0),
                unit="times",
                empty_reason=ALL_DIVERGED,
            )
            for panel in records.panels
            for series in ("MERIT", "MaxLAMB")
        ),
    )
    rows = tuple(
        (
            panel,
            series,
            records.of(panel=panel, series=series).statuses,
            *(spread_text(at(panel, series, place), ".2f") for place in (0, -1)),
        )
        for panel in records.panels
        for series in records.series
    )
    charts = tuple(
        _reach_chart(records.of(panel=panel), f"reach-{place}", panel)
        for place, panel in enumerate(records.panels, start=1)
    )
    table = Table(("Model", "Optimizer", "Runs", "First step", "Last step"), rows, num_text=3)
    return Analysis(table=table, charts=charts, verdicts=(claim,))


def _reach_chart(records: Records, name: str, panel: str) -> Chart:
    return line_chart(
        {series: records.of(series=series).lines(reach) for series in records.series},
        records.optimizers,
        Axis("steps", ",d", from_zero=True),
        Axis("relative change / learning rate", ".2~f", from_zero=True),
        name=name,
        title=f"How far a step goes: {panel}",
        caption="The norm of a step over the norm of the weight, mean over the matrices of all blocks, as a "
        "multiple of the learning rate.",
    )


ENTRIES = (
    PaperEntry(
        name="reach",
        title="How far a step goes",
        shows="beyond the paper: a step's relative change of the weights against the learning rate",
        trials=lambda scale, seeds: scale.trials(scale.gpt2[:2], ("lamb", "maxlamb", "merit"), seeds),
        analyse=_reach,
    ),
    PaperEntry(
        name="fig13",
        title="Figure 13: clipped elements",
        shows="share of clipped elements, first, middle and last layer",
        trials=lambda scale, seeds: scale.trials([_fig13_setup(scale)], ("merit",), seeds),
        analyse=_fig13,
    ),
    PaperEntry(
        name="fig15",
        title="Figure 15: the weight-wise bound",
        shows="share of elements where the weight-wise bound decided",
        trials=lambda scale, seeds: scale.trials([scale.observed], ("merit",), seeds),
        analyse=_fig15,
    ),
)
