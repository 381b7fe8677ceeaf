"""Losses and logits of longer training."""

from __future__ import annotations

from merit_lab.paper.entries.logits import MEASURE, largest_logits, logit_charts, lower_logits
from merit_lab.paper.entries.losses import (
    FOUR,
    below,
    loss_charts,
    loss_table,
)
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import Records, spread_text
from merit_lab.paper.setups import Scale
from merit_lab.paper.verdict import Verdict
from merit_lab.tables import Table


def _analyse(records: Records, scale: Scale) -> Analysis:
    longer = scale.horizon
    places = {"first layer": range(1, 2), "mean of all layers": range(1, longer.model.layers + 1)}
    order = Verdict(
        claim="With several times the tokens, too, MERIT ends below AdamW, LAMB and maxLAMB.",
        source="figure 4 and table 3, which have one length for each model",
        comparisons=tuple(
            below(records, "MERIT", rival, longer.name) for rival in ("AdamW", "LAMB", "MaxLAMB")
        ),
    )
    calm = Verdict(
        claim="And its largest logits stay below AdamW's and LAMB's there.",
        source="figures 2 and 14, which have one length",
        comparisons=tuple(
            lower_logits(records.of(panel=longer.name), "MERIT", rival, layers, place)
            for rival in ("AdamW", "LAMB")
            for place, layers in places.items()
        ),
    )
    return Analysis(
        table=_with_logits(loss_table(records, {}), records, places),
        charts=(*loss_charts(records), *logit_charts(records, {"First layer": places["first layer"]})),
        verdicts=(order, calm),
        notes=(MEASURE,),
    )


def _with_logits(table: Table, records: Records, places: dict[str, range]) -> Table:
    """The table with a column for the largest logit at each place."""
    rows = []
    for row in table.rows:
        runs = records.of(panel=row[0], series=row[1])
        logits = [spread_text(largest_logits(runs, layers), ".1f") for layers in places.values()]
        rows.append((*row, *logits))
    head = (*table.head, *(f"Largest logit, {place}" for place in places))
    return Table(head, tuple(rows), num_text=table.num_text)


ENTRIES = (
    PaperEntry(
        name="horizon",
        title="Longer training",
        shows="beyond the paper: loss and logits of AdamW, LAMB, maxLAMB and MERIT after more tokens",
        trials=lambda scale, seeds: scale.trials([scale.gpt2[0], scale.horizon], FOUR, seeds),
        analyse=_analyse,
        is_grid=True,
    ),
)
