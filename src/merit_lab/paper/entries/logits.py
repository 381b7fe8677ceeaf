"""The largest attention logit: figures 2, 11 and 14, and a comparison of sizes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from merit_lab.paper.entries.losses import FIVE
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.heatmaps import layer_chart
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import WATCHED, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict, paired
from merit_lab.results.curves import layer_name
from merit_lab.study.charts import Axis, Chart, curve_chart
from merit_lab.tables import Table

MEASURE = (
    "The comparison uses the largest logit that a layer had at any step. A run that diverged counts as worse "
    "than any other, whatever its logits were."
)


def _small(scale: Scale) -> Setup:
    return scale.observed.with_batch(scale.small_batch)


def _middle(num_layers: int) -> int:
    """The middle layer, for example the 12th of 24."""
    return (num_layers + 1) // 2


def largest_logits(records: Records, layers: range) -> BySeed:
    """By seed, the mean over layers of each layer's largest logit; infinite if the run diverged."""

    def quantity(record: TrialRecord) -> float | None:
        values = [record.largest(layer_name(layer)) for layer in layers]
        measured = [value for value in values if value is not None]
        return statistics.fmean(measured) if len(measured) == len(values) else None

    return records.by_seed(quantity, diverged=math.inf)


def lower_logits(records: Records, lower: str, higher: str, layers: range, where: str) -> ClaimComparison:
    """Compare two series' largest logits in these layers."""
    return paired(
        f"{lower} below {higher}, {where}",
        largest_logits(records.of(series=lower), layers),
        largest_logits(records.of(series=higher), layers),
        unit="logit",
    )


def _table(records: Records, places: Mapping[str, dict[str, range]]) -> Table:
    """The largest logits at each panel's places; all panels use the same names for them."""
    rows = []
    for panel, series, runs in records.by_panel_and_series():
        values = [spread_text(largest_logits(runs, layers), ".2f") for layers in places[panel].values()]
        rows.append((panel, series, runs.statuses, *values))
    names = places[records.panels[0]]
    return Table(("Model", "Optimizer", "Runs", *names), tuple(rows), num_text=3)


def logit_charts(records: Records, places: dict[str, range]) -> tuple[Chart, ...]:
    """The largest logit of each place's first layer over the steps, a chart for each panel and place."""
    charts: list[Chart] = []
    for panel in records.panels:
        for place, layers in places.items():
            number = len(charts) + 1
            charts.append(
                curve_chart(
                    records.of(panel=panel).curves(layer_name(layers[0])),
                    records.of(panel=panel).optimizers,
                    Axis("largest attention logit"),
                    name=f"logit-{number}",
                    title=f"{place}, {panel}",
                    caption=f"Largest attention logit of layer {layers[0]}.",
                )
            )
    return tuple(charts)


def _single_layers(setup: Setup) -> dict[str, range]:
    middle = _middle(setup.model.layers)
    return {"First layer": range(1, 2), "Middle layer": range(middle, middle + 1)}


def _fig2(records: Records, scale: Scale) -> Analysis:
    places = _single_layers(scale.observed)
    first, middle = places.values()
    claim = Verdict(
        claim="AdamW's largest logit grows far beyond LAMB's and MERIT's in the first layer; in the middle "
        "layer only MERIT keeps it down.",
        source="figure 2",
        comparisons=(
            lower_logits(records, "LAMB", "AdamW", first, "first layer"),
            lower_logits(records, "MERIT", "AdamW", first, "first layer"),
            lower_logits(records, "MERIT", "LAMB", middle, "middle layer"),
        ),
    )
    return Analysis(
        table=_table(records, dict.fromkeys(records.panels, places)),
        charts=logit_charts(records, places),
        verdicts=(claim,),
        notes=(MEASURE,),
    )


def _fig11(records: Records, scale: Scale) -> Analysis:
    places = _single_layers(scale.observed)
    small, large = (records.of(panel=setup.name) for setup in (_small(scale), scale.observed))
    claim = Verdict(
        claim="With a small batch the largest logits are well below those with a large batch.",
        source="figure 11",
        comparisons=tuple(
            paired(
                f"{series}, {place.lower()}: small batch below large batch",
                largest_logits(small.of(series=series), layers),
                largest_logits(large.of(series=series), layers),
                unit="logit",
            )
            for series in small.series
            for place, layers in places.items()
        ),
    )
    return Analysis(
        table=_table(records, dict.fromkeys(records.panels, places)),
        charts=logit_charts(small, places),
        verdicts=(claim,),
        notes=(
            MEASURE,
            "Learning rates of the small batch are the large one's, scaled by the square root of the batch.",
        ),
    )


def _fig14(records: Records, scale: Scale) -> Analysis:
    num_layers = scale.observed.model.layers
    # Of 24 layers the paper calls 1 to 8 shallow and 9 to 17 middle.
    shallow = range(1, max(1, num_layers // 3) + 1)
    middle = range(shallow[-1] + 1, max(shallow[-1] + 1, round(17 / 24 * num_layers)) + 1)
    deep = range(middle[-1] + 1, num_layers + 1)
    places = {
        f"Layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"Layer {layers[0]}": layers
        for layers in (shallow, middle, deep)
        if layers and layers[-1] <= num_layers
    }
    claim = Verdict(
        claim="In shallow layers LAMB and MERIT both stay below AdamW; in the middle layers MERIT stays "
        "below LAMB.",
        source="figure 14",
        comparisons=(
            lower_logits(records, "LAMB", "AdamW", shallow, "shallow layers"),
            lower_logits(records, "MERIT", "AdamW", shallow, "shallow layers"),
            lower_logits(records, "MERIT", "LAMB", middle, "middle layers"),
        ),
    )
    values = [
        value
        for record in records.all
        for layer in range(1, num_layers + 1)
        for _, value in record.points(layer_name(layer))
    ]
    domain = (min(values, default=0.0), max(values, default=1.0))
    charts = tuple(
        layer_chart(
            records.of(series=series),
            domain,
            name=f"layers-{place}",
            title=f"Every layer, {series}",
            caption="Largest logit of each layer, mean over seeds; all optimizers share one colour scale.",
        )
        for place, series in enumerate(records.series, start=1)
        if any(record.points(layer_name(1)) for record in records.of(series=series).all)
    )
    notes = (MEASURE + " Over several layers: the mean of their largest.",)
    table = _table(records, dict.fromkeys(records.panels, places))
    return Analysis(table=table, charts=charts, verdicts=(claim,), notes=notes)


def _logits(records: Records, scale: Scale) -> Analysis:
    places = {
        setup.name: {**_single_layers(setup), "Mean of all layers": range(1, setup.model.layers + 1)}
        for setup in scale.gpt2
    }
    claim = Verdict(
        claim="At any size MERIT's largest logits stay below LAMB's, each at its best learning rate.",
        source="ours; figures 2 and 14 have one size",
        comparisons=tuple(
            lower_logits(
                records.of(panel=panel),
                "MERIT",
                "LAMB",
                layers,
                f"{place[0].lower()}{place[1:]}{records.panel_suffix(panel)}",
            )
            for panel in records.panels
            for place, layers in places[panel].items()
            if place != "Middle layer"
        ),
    )
    charts = logit_charts(records, {"First layer": range(1, 2)})
    return Analysis(table=_table(records, places), charts=charts, verdicts=(claim,), notes=(MEASURE,))


ENTRIES = (
    PaperEntry(
        name="logits",
        title="Largest logits at each size",
        shows="beyond the paper: largest attention logit with AdamW, LAMB, maxLAMB, MERIT and Lion",
        trials=lambda scale, seeds: scale.trials(scale.gpt2[:2], FIVE, seeds),
        analyse=_logits,
    ),
    PaperEntry(
        name="fig2",
        title="Figure 2: the largest attention logit",
        shows="largest attention logit over training, first and middle layer, large batch",
        trials=lambda scale, seeds: scale.trials([scale.observed], WATCHED, seeds),
        analyse=_fig2,
    ),
    PaperEntry(
        name="fig11",
        title="Figure 11: the largest attention logit with a small batch",
        shows="largest attention logit over training, small batch against large",
        trials=lambda scale, seeds: [
            *scale.trials([_small(scale)], WATCHED, seeds),
            *scale.trials([scale.observed], WATCHED, seeds),
        ],
        analyse=_fig11,
        is_grid=True,
    ),
    PaperEntry(
        name="fig14",
        title="Figure 14: the largest attention logit of every layer",
        shows="largest attention logit over training, all layers",
        trials=lambda scale, seeds: scale.trials([scale.observed], WATCHED, seeds),
        analyse=_fig14,
    ),
)
