"""Twice the batch and a longer warm-up, each with separate learning rates."""

from __future__ import annotations

from merit_lab.paper.entries.losses import FIVE, FOUR, below, loss_charts
from merit_lab.paper.entries.rates import (
    at_rate,
    grid_table,
    losses_at_best,
    rate_of,
    rate_table,
    rates_around,
    rates_chart,
    rates_charts,
)
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import Records
from merit_lab.paper.setups import EntryTrial, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict, paired
from merit_lab.results.gather import DISPLAY_NAMES

_LONG_WARMUP = 0.1


def _doubled_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    """A grid with the first seed, and the other seeds at its middle rate."""
    trials = []
    for single, doubled in zip(scale.gpt2, scale.doubled, strict=False):
        trials += scale.trials([single], FIVE, seeds)
        for name in FIVE:
            trials += [scale.trial(doubled, name, 0, lr=rate) for rate in rates_around(doubled.rates[name])]
            trials += [scale.trial(doubled, name, seed) for seed in range(1, seeds)]
    return trials


def _doubled(records: Records, scale: Scale) -> Analysis:
    pairs = list(zip(scale.gpt2, scale.doubled, strict=False))
    rates = {setup.name: setup.rates for pair in pairs for setup in pair}
    middle = records.where(
        lambda record: rate_of(record) == rates[record.panel][record.config.optimizer.name]
    )
    order = Verdict(
        claim="With twice the batch, too, MERIT ends below AdamW, LAMB, maxLAMB and Lion, each at its middle "
        "rate.",
        source="figure 4 and table 3, which have one batch for each model",
        comparisons=tuple(
            below(middle, "MERIT", rival, doubled.name)
            for doubled in scale.doubled
            for rival in ("AdamW", "LAMB", "MaxLAMB", "Lion")
        ),
    )
    price = Verdict(
        claim="After as many tokens every optimizer ends higher with twice the batch, which is half the "
        "steps.",
        source="ours, not the paper's",
        comparisons=tuple(
            paired(
                f"{single.model_name}, {series}: batch {single.batch} below batch {doubled.batch}",
                middle.of(panel=single.name, series=series).final_losses(),
                middle.of(panel=doubled.name, series=series).final_losses(),
                unit="nats",
            )
            for single, doubled in pairs
            for series in middle.series
        ),
    )
    return Analysis(
        table=grid_table(records, scale),
        charts=(
            *loss_charts(middle, over_tokens=True),
            *(
                rates_chart(records.of(panel=doubled.name), place, doubled.name)
                for place, doubled in enumerate(scale.doubled, start=1)
            ),
        ),
        verdicts=(order, price),
        notes=("Only the first seed has the grid. The claims use all seeds, at the rate in its middle.",),
    )


def _with_long_warmup(name: str) -> str:
    return f"{DISPLAY_NAMES[name]}, warm-up {_LONG_WARMUP:.0%}"


def _warmup_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    """Two rates with the usual warm-up, three with the longer one, whose best rate may be higher."""
    trials = []
    for seed in range(seeds):
        for setup in scale.gpt2[:2]:
            for name in FOUR:
                rate, series = setup.rates[name], _with_long_warmup(name)
                trials += [scale.trial(setup, name, seed, lr=factor * rate) for factor in (1, 2)]
                trials += [
                    scale.trial(setup, name, seed, lr=factor * rate, warmup=_LONG_WARMUP, series=series)
                    for factor in (1, 2, 4)
                ]
    return trials


def _warmup(records: Records, scale: Scale) -> Analysis:
    def at_twice(name: str, setup: Setup) -> ClaimComparison:
        plain, rate = DISPLAY_NAMES[name], 2 * setup.rates[name]
        where = records.panel_suffix(setup.name)
        return paired(
            f"{_with_long_warmup(name)} below {plain}, both at {rate:g}{where}",
            at_rate(records.of(panel=setup.name, series=_with_long_warmup(name)), rate).final_losses(),
            at_rate(records.of(panel=setup.name, series=plain), rate).final_losses(),
            unit="nats",
        )

    def at_best(rival: str, panel: str) -> ClaimComparison:
        merit = _with_long_warmup("merit")
        return paired(
            f"{merit} below {rival}{records.panel_suffix(panel)}",
            losses_at_best(records.of(panel=panel, series=merit)),
            losses_at_best(records.of(panel=panel, series=rival)),
            unit="nats",
        )

    wider = Verdict(
        claim="With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
        "their learning rate.",
        source="ours, not the paper's",
        comparisons=tuple(at_twice(name, setup) for setup in scale.gpt2[:2] for name in ("merit", "maxlamb")),
    )
    better = Verdict(
        claim="And MERIT ends lower than with the short one, each at its best rate.",
        source="ours, not the paper's",
        comparisons=tuple(at_best("MERIT", panel) for panel in records.panels),
    )
    still = Verdict(
        claim="With the longer warm-up MERIT ends below AdamW and LAMB that have it too, each at its best "
        "rate.",
        source="ours, not the paper's",
        comparisons=tuple(
            at_best(_with_long_warmup(rival), panel)
            for panel in records.panels
            for rival in ("adamw", "lamb")
        ),
    )
    return Analysis(
        table=rate_table(records),
        charts=rates_charts(records),
        verdicts=(wider, better, still),
    )


ENTRIES = (
    PaperEntry(
        name="doubled",
        title="Twice the batch",
        shows="beyond the paper: validation loss of AdamW, LAMB, maxLAMB, MERIT and Lion with twice the "
        "batch, at separate learning rates",
        trials=_doubled_trials,
        analyse=_doubled,
    ),
    PaperEntry(
        name="warmup",
        title="A longer warm-up",
        shows="beyond the paper: AdamW, LAMB, maxLAMB and MERIT with five times the warm-up, at twice and "
        "four times their rates too",
        trials=_warmup_trials,
        analyse=_warmup,
        is_grid=True,
    ),
)
