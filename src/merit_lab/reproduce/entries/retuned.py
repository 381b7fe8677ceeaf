"""Twice the batch and a longer warm-up, which want learning rates of their own."""

from __future__ import annotations

from merit_lab.report.gather import DISPLAY_NAMES
from merit_lab.reproduce.entries.losses import FIVE, FOUR, below, loss_charts, trials_of
from merit_lab.reproduce.entries.rates import (
    at_rate,
    grid_table,
    losses_at_best,
    rate_of,
    rate_table,
    rates_around,
    rates_chart,
)
from merit_lab.reproduce.entry import Entry, Result
from merit_lab.reproduce.records import Records
from merit_lab.reproduce.scale import Scale, Setting, Shown
from merit_lab.reproduce.verdict import Comparison, Verdict, paired

_LONG_WARMUP = 0.1


def _doubled_trials(scale: Scale, seeds: int) -> list[Shown]:
    """A grid with one seed, and the further seeds at its middle."""
    trials = []
    for single, doubled in zip(scale.gpt2, scale.doubled, strict=False):
        trials += trials_of([single], FIVE, scale, seeds)
        for name in FIVE:
            trials += [scale.trial(doubled, name, 0, lr=rate) for rate in rates_around(doubled.rates[name])]
            trials += [scale.trial(doubled, name, seed) for seed in range(1, seeds)]
    return trials


def _doubled(records: Records, scale: Scale) -> Result:
    pairs = list(zip(scale.gpt2, scale.doubled, strict=False))
    rates = {own.name: own.rates for pair in pairs for own in pair}
    middle = records.where(lambda own: rate_of(own) == rates[own.panel][own.config.optimizer.name])
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
    return Result(
        table=grid_table(records, scale),
        charts=(
            *loss_charts(middle, over_tokens=True),
            *(
                rates_chart(records.of(panel=doubled.name), place, doubled.name)
                for place, doubled in enumerate(scale.doubled, start=1)
            ),
        ),
        verdicts=(order, price),
        notes=(
            "The grid is of the first seed alone. The claims are of all seeds, at the rate in its middle.",
        ),
    )


def _with_long_warmup(name: str) -> str:
    return f"{DISPLAY_NAMES[name]}, warm-up {_LONG_WARMUP:.0%}"


def _warmup_trials(scale: Scale, seeds: int) -> list[Shown]:
    """Two rates with the usual warm-up; with the longer one a third, as its best may lie further up."""
    trials = []
    for seed in range(seeds):
        for setting in scale.gpt2[:2]:
            for name in FOUR:
                rate, series = setting.rates[name], _with_long_warmup(name)
                trials += [scale.trial(setting, name, seed, lr=factor * rate) for factor in (1, 2)]
                trials += [
                    scale.trial(setting, name, seed, lr=factor * rate, warmup=_LONG_WARMUP, series=series)
                    for factor in (1, 2, 4)
                ]
    return trials


def _warmup(records: Records, scale: Scale) -> Result:
    def at_twice(name: str, setting: Setting) -> Comparison:
        plain, rate = DISPLAY_NAMES[name], 2 * setting.rates[name]
        where = records.where_in_words(setting.name)
        return paired(
            f"{_with_long_warmup(name)} below {plain}, both at {rate:g}{where}",
            at_rate(records.of(panel=setting.name, series=_with_long_warmup(name)), rate).final_losses(),
            at_rate(records.of(panel=setting.name, series=plain), rate).final_losses(),
            unit="nats",
        )

    def at_best(rival: str, panel: str) -> Comparison:
        merit = _with_long_warmup("merit")
        return paired(
            f"{merit} below {rival}{records.where_in_words(panel)}",
            losses_at_best(records.of(panel=panel, series=merit)),
            losses_at_best(records.of(panel=panel, series=rival)),
            unit="nats",
        )

    wider = Verdict(
        claim="With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
        "their learning rate.",
        source="ours, not the paper's",
        comparisons=tuple(
            at_twice(name, setting) for setting in scale.gpt2[:2] for name in ("merit", "maxlamb")
        ),
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
    return Result(
        table=rate_table(records),
        charts=tuple(
            rates_chart(records.of(panel=panel), place, panel)
            for place, panel in enumerate(records.panels, start=1)
        ),
        verdicts=(wider, better, still),
    )


ENTRIES = (
    Entry(
        name="doubled",
        title="Twice the batch",
        shows="beyond the paper: validation loss of AdamW, LAMB, maxLAMB, MERIT and Lion with twice the "
        "batch, at learning rates of its own",
        trials=_doubled_trials,
        analyse=_doubled,
    ),
    Entry(
        name="warmup",
        title="A longer warm-up",
        shows="beyond the paper: AdamW, LAMB, maxLAMB and MERIT with five times the warm-up, at twice and "
        "four times their rates too",
        trials=_warmup_trials,
        analyse=_warmup,
        is_grid=True,
    ),
)
