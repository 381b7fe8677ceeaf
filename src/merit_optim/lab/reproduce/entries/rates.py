"""Learning rates: figure 8, table 4, those of twice the batch, and a longer warm-up."""

from __future__ import annotations

import math

from merit_optim.lab.report.curves import MAX_LOGIT
from merit_optim.lab.report.gather import DISPLAY_NAMES
from merit_optim.lab.report.tables import Table
from merit_optim.lab.reproduce.charts import Axis, line_chart, looks
from merit_optim.lab.reproduce.entries.losses import (
    FOUR,
    LOSS,
    below,
    loss_charts,
    spread_text,
    status_counts,
    trials_of,
)
from merit_optim.lab.reproduce.entry import Chart, Entry, Result
from merit_optim.lab.reproduce.records import BySeed, Record, Records
from merit_optim.lab.reproduce.scale import Scale, Trial
from merit_optim.lab.reproduce.verdict import Verdict, paired

_QK_NORM = "AdamW with QK-Norm"
_FACTORS = (0.5, 1.0, 2.0)
_OPTIMIZERS = ("adamw", "lamb", "maxlamb", "merit", "lion", "sophiag")  # the paper has no maxLAMB here
_LONG_WARMUP = 0.1


def _rates(rate: float) -> list[float]:
    return [float(f"{rate * factor:.3g}") for factor in _FACTORS]


def _grid(scale: Scale, seeds: int) -> list[Trial]:
    return [
        scale.trial(setting, name, seed, lr=rate)
        for seed in range(seeds)
        for setting in scale.gpt2
        for name in _OPTIMIZERS
        for rate in _rates(setting.rates[name])
    ]


def _rate(record: Record) -> float:
    assert record.config.optimizer.lr is not None, "the configuration is resolved"
    return record.config.optimizer.lr


def _at(records: Records, rate: float) -> Records:
    return records.where(lambda own: _rate(own) == rate)


def _all_rates(records: Records) -> list[float]:
    return sorted({_rate(own) for own in records.all})


def _best_rate(records: Records) -> float | None:
    """The rate with the lowest mean of the final losses, over the seeds that all rates have.

    One that diverged has an infinite loss; None where no rate has a finite mean.
    """
    by_rate = {rate: losses for rate in _all_rates(records) if (losses := _at(records, rate).final_losses())}
    shared = set.intersection(*map(set, by_rate.values())) if by_rate else set()
    if not shared:
        return None
    means = {
        rate: math.fsum(losses[seed] for seed in shared) / len(shared) for rate, losses in by_rate.items()
    }
    best = min(means, key=means.__getitem__)
    return best if math.isfinite(means[best]) else None


def _best_rates(records: Records) -> BySeed:
    """The best rate of each seed whose runs are all done; NaN where it has no worse one on each side.

    A best rate on the grid's edge tells where the grid was put, not which rate is best.
    """
    rates = _all_rates(records)
    by_rate = [_at(records, rate).final_losses() for rate in rates]
    best = {}
    for seed in sorted(set[int]().union(*by_rate)):
        if not all(seed in losses for losses in by_rate):
            continue
        losses = [own[seed] for own in by_rate]
        place = losses.index(min(losses))
        is_inside = 0 < place < len(rates) - 1 and losses[place] < losses[place + 1]
        best[seed] = rates[place] if is_inside else math.nan
    return best


def _losses_at_best(records: Records) -> BySeed:
    best = _best_rate(records)
    return {} if best is None else _at(records, best).final_losses()


def _chart(records: Records, place: int, panel: str) -> Chart:
    lines = {}
    for series in records.series:
        own = records.of(series=series)
        by_seed = {
            seed: sorted(
                (_rate(one), loss)
                for one in own.all
                if one.config.seed == seed and (loss := one.final_loss()) is not None and math.isfinite(loss)
            )
            for seed in sorted({one.config.seed for one in own.all})
        }
        lines[series] = [
            (f"{series} seed {seed}", points, False) for seed, points in by_seed.items() if points
        ]
    return line_chart(
        {series: own for series, own in lines.items() if own},
        looks(records.all),
        Axis("peak learning rate", ".1~e", logarithmic=True),
        LOSS,
        name=f"rates-{place}",
        title=f"Final validation loss against the learning rate, {panel}",
        caption="Means over seeds. Runs that diverged have no loss to show; the table names them.",
    )


def _grid_table(records: Records, scale: Scale) -> Table:
    papers = {own.name: own for own in scale.gpt2 if own.paper}
    rows = []
    for panel in records.panels:
        for series in records.of(panel=panel).series:
            own = records.of(panel=panel, series=series)
            best, rates = _best_rate(own), _all_rates(own)
            for rate in rates:
                remark = ""
                if rate == best and len(rates) > 1:
                    remark = "best, on the edge of the grid" if rate in (rates[0], rates[-1]) else "best"
                name = _at(own, rate).all[0].config.optimizer.name
                is_paper = panel in papers and math.isclose(papers[panel].rates[name], rate)
                rows.append(
                    (
                        panel,
                        series,
                        status_counts(_at(own, rate)),
                        remark,
                        f"{rate:g}" + (" (the paper's)" if is_paper else ""),
                        spread_text(_at(own, rate).final_losses()),
                        spread_text(_at(own, rate).by_seed(lambda record: record.largest(MAX_LOGIT)), ".4g"),
                    )
                )
    head = ("Model", "Optimizer", "Runs", "", "Peak learning rate", "Validation loss", "Largest logit")
    return Table(head, tuple(rows), num_text=4)


def _table4(records: Records, scale: Scale) -> Result:
    papers = {own.name: own.rates for own in scale.gpt2 if own.paper}

    def higher(lower: str, upper: str, panel: str) -> tuple[str, BySeed, BySeed, str]:
        rates = [
            {s: math.log10(rate) for s, rate in _best_rates(records.of(panel=panel, series=own)).items()}
            for own in (lower, upper)
        ]
        names = {display: name for name, display in DISPLAY_NAMES.items()}
        paper = papers.get(panel)
        text = f"{paper[names[lower]]:g} against {paper[names[upper]]:g}" if paper else ""
        return f"{lower}'s best rate below {upper}'s{records.where_in_words(panel)}", rates[0], rates[1], text

    pairs = (("AdamW", "LAMB"), ("AdamW", "MERIT"), ("Lion", "AdamW"))
    claim = Verdict(
        claim="LAMB and MERIT want higher learning rates than AdamW (they are relative to the weights), Lion "
        "a lower one.",
        source="table 4",
        comparisons=tuple(
            paired(
                what,
                lower,
                upper,
                paper=paper,
                unit="powers of ten",
                silence="no seed has both best rates inside their grids",
            )
            for panel in records.panels
            for what, lower, upper, paper in [higher(*pair, panel) for pair in pairs]
        ),
    )
    return Result(
        table=_grid_table(records, scale),
        charts=tuple(
            _chart(records.of(panel=panel), place, panel)
            for place, panel in enumerate(records.panels, start=1)
        ),
        verdicts=(claim,),
        notes=(
            (
                "A seed's best rate counts only where it lies inside the grid, with a worse one on each "
                "side: each optimizer's grid is around its own rate, so one on the edge tells where the grid "
                "was put, not which rate is best."
            ),
            (
                "The other entries use the rate in the middle of each grid. Where the best is another, or on "
                "the edge, `merit sweep` goes on from here."
            ),
        ),
    )


def _doubled_trials(scale: Scale, seeds: int) -> list[Trial]:
    """A grid with one seed, and the further seeds at its middle."""
    doubled = scale.doubled
    return [
        *trials_of([scale.gpt2[0]], FOUR, scale, seeds),
        *(scale.trial(doubled, name, 0, lr=rate) for name in FOUR for rate in _rates(doubled.rates[name])),
        *(scale.trial(doubled, name, seed) for seed in range(1, seeds) for name in FOUR),
    ]


def _doubled(records: Records, scale: Scale) -> Result:
    single, doubled = scale.gpt2[0], scale.doubled
    rates = {own.name: own.rates for own in (single, doubled)}
    middle = records.where(lambda own: _rate(own) == rates[own.panel][own.config.optimizer.name])
    grid = records.of(panel=doubled.name).where(lambda own: own.config.seed == 0)
    order = Verdict(
        claim="With twice the batch, too, MERIT ends below AdamW, LAMB and maxLAMB, each at its middle rate.",
        source="figure 4 and table 3, which have one batch for each model",
        comparisons=tuple(
            below(middle, "MERIT", rival, doubled.name) for rival in ("AdamW", "LAMB", "MaxLAMB")
        ),
    )
    price = Verdict(
        claim="After as many tokens every optimizer ends higher with twice the batch, which is half the "
        "steps.",
        source="ours, not the paper's",
        comparisons=tuple(
            paired(
                f"{series} with batch {single.batch} below {series} with batch {doubled.batch}",
                middle.of(panel=single.name, series=series).final_losses(),
                middle.of(panel=doubled.name, series=series).final_losses(),
                unit="nats",
            )
            for series in middle.series
        ),
    )
    return Result(
        table=_grid_table(records, scale),
        charts=(*loss_charts(middle, over_tokens=True), _chart(grid, 1, doubled.name)),
        verdicts=(order, price),
        notes=(
            "The grid is of the first seed alone. The claims are of all seeds, at the rate in its middle.",
        ),
    )


def _qk_trials(scale: Scale, seeds: int) -> list[Trial]:
    setting = scale.gpt2[0]
    trials = []
    for seed in range(seeds):
        trials.append(scale.trial(setting, "merit", seed))
        for rate in [*_rates(setting.rates["adamw"]), float(f"{4 * setting.rates['adamw']:.3g}")]:
            for qk_norm, series in ((False, "AdamW"), (True, _QK_NORM)):
                trials.append(scale.trial(setting, "adamw", seed, lr=rate, qk_norm=qk_norm, series=series))
    return trials


def _fig8(records: Records, scale: Scale) -> Result:
    panel = scale.gpt2[0].name
    plain, normed, merit = (records.of(series=series) for series in ("AdamW", _QK_NORM, "MERIT"))
    highest = _all_rates(normed)[-1]
    wider = Verdict(
        claim="QK-Norm lets AdamW use higher learning rates.",
        source="figure 8",
        comparisons=(
            paired(
                f"at the highest rate, {highest:g}, with QK-Norm below without",
                _at(normed, highest).final_losses(),
                _at(plain, highest).final_losses(),
                unit="nats",
            ),
        ),
    )
    worse = Verdict(
        claim="With large batches QK-Norm costs quality: it ends above AdamW without it, and above MERIT.",
        source="figure 8 and section 5.3",
        comparisons=(
            paired(
                "AdamW below AdamW with QK-Norm, each at its best rate",
                _losses_at_best(plain),
                _losses_at_best(normed),
                unit="nats",
            ),
            paired(
                "MERIT below AdamW with QK-Norm at its best rate",
                merit.final_losses(),
                _losses_at_best(normed),
                unit="nats",
            ),
        ),
    )
    return Result(
        table=_rate_table(records, panel),
        charts=(_chart(records, 1, panel),),
        verdicts=(wider, worse),
        notes=("QK-Norm here is RMSNorm with a learned scale on each head's queries and keys.",),
    )


def _rate_table(records: Records, panel: str) -> Table:
    rows = []
    for series in records.series:
        for rate in _all_rates(records.of(series=series)):
            own = _at(records.of(series=series), rate)
            rows.append((panel, series, f"{rate:g}", status_counts(own), spread_text(own.final_losses())))
    return Table(
        ("Model", "Optimizer", "Peak learning rate", "Runs", "Validation loss"), tuple(rows), num_text=4
    )


def _with_long_warmup(name: str) -> str:
    return f"{DISPLAY_NAMES[name]}, warm-up {_LONG_WARMUP:.0%}"


def _warmup_trials(scale: Scale, seeds: int) -> list[Trial]:
    setting = scale.gpt2[0]
    trials = []
    for seed in range(seeds):
        for name in FOUR:
            for rate in (setting.rates[name], 2 * setting.rates[name]):
                series = _with_long_warmup(name)
                trials += [
                    scale.trial(setting, name, seed, lr=rate),
                    scale.trial(setting, name, seed, lr=rate, warmup=_LONG_WARMUP, series=series),
                ]
    return trials


def _warmup(records: Records, scale: Scale) -> Result:
    plain = {name: records.of(series=DISPLAY_NAMES[name]) for name in FOUR}
    warmed = {name: records.of(series=_with_long_warmup(name)) for name in FOUR}
    higher = {name: _all_rates(plain[name])[-1] for name in FOUR}
    wider = Verdict(
        claim="With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
        "their learning rate.",
        source="ours, not the paper's",
        comparisons=tuple(
            paired(
                f"{_with_long_warmup(name)} below {DISPLAY_NAMES[name]}, both at {higher[name]:g}",
                _at(warmed[name], higher[name]).final_losses(),
                _at(plain[name], higher[name]).final_losses(),
                unit="nats",
            )
            for name in ("merit", "maxlamb")
        ),
    )
    better = Verdict(
        claim="And MERIT ends lower than with the short one, each at its best rate.",
        source="ours, not the paper's",
        comparisons=(
            paired(
                f"{_with_long_warmup('merit')} below MERIT",
                _losses_at_best(warmed["merit"]),
                _losses_at_best(plain["merit"]),
                unit="nats",
            ),
        ),
    )
    still = Verdict(
        claim="With the longer warm-up, too, MERIT ends below AdamW, each at its best rate.",
        source="ours, not the paper's",
        comparisons=(
            paired(
                f"{_with_long_warmup('merit')} below {_with_long_warmup('adamw')}",
                _losses_at_best(warmed["merit"]),
                _losses_at_best(warmed["adamw"]),
                unit="nats",
            ),
        ),
    )
    panel = scale.gpt2[0].name
    return Result(
        table=_rate_table(records, panel),
        charts=(_chart(records, 1, panel),),
        verdicts=(wider, better, still),
        notes=("The best rate is of two: where it is the higher one, a better one may lie further up.",),
    )


ENTRIES = (
    Entry(
        name="doubled",
        title="Twice the batch",
        shows="beyond the paper: validation loss of AdamW, LAMB, maxLAMB and MERIT with twice the batch, at "
        "learning rates of its own",
        trials=_doubled_trials,
        analyse=_doubled,
    ),
    Entry(
        name="warmup",
        title="A longer warm-up",
        shows="beyond the paper: AdamW, LAMB, maxLAMB and MERIT with five times the warm-up, at twice their "
        "rates too",
        trials=_warmup_trials,
        analyse=_warmup,
        is_grid=True,
    ),
    Entry(
        name="fig8",
        title="Figure 8: QK-Norm against MERIT",
        shows="AdamW with and without QK-Norm at several learning rates, and MERIT",
        trials=_qk_trials,
        analyse=_fig8,
        is_grid=True,
    ),
    Entry(
        name="table4",
        title="Table 4: learning rates",
        shows="grids of learning rates, per optimizer and size",
        trials=_grid,
        analyse=_table4,
        is_grid=True,
    ),
)
