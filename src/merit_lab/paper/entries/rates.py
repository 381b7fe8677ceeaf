"""Learning rates: figure 8, table 4, and grids on Llama."""

from __future__ import annotations

import math
from collections.abc import Sequence

from merit_lab.paper.entries.losses import LOSS
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import WATCHED, EntryTrial, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict, paired
from merit_lab.results.curves import MAX_LOGIT
from merit_lab.results.gather import DISPLAY_NAMES
from merit_lab.study.charts import Axis, Chart, line_chart
from merit_lab.tables import Table

_QK_NORM = "AdamW with QK-Norm"
_FACTORS = (0.5, 1.0, 2.0)
_OPTIMIZERS = ("adamw", "lamb", "maxlamb", "merit", "lion", "sophiag")  # the paper has no maxLAMB here


def rates_around(rate: float) -> list[float]:
    """A grid by factors of two, with ``rate`` in the middle."""
    return [float(f"{rate * factor:.3g}") for factor in _FACTORS]


def _grid(setups: Sequence[Setup], optimizers: Sequence[str], scale: Scale, seeds: int) -> list[EntryTrial]:
    return [
        scale.trial(setup, name, seed, lr=rate)
        for seed in range(seeds)
        for setup in setups
        for name in optimizers
        for rate in rates_around(setup.rates[name])
    ]


def rate_of(record: TrialRecord) -> float:
    """The peak learning rate of a run."""
    assert record.config.optimizer.lr is not None, "the configuration is resolved"
    return record.config.optimizer.lr


def at_rate(records: Records, rate: float) -> Records:
    """The records with this peak learning rate."""
    return records.where(lambda record: rate_of(record) == rate)


def _all_rates(records: Records) -> list[float]:
    """The peak learning rates of the runs, ascending."""
    return sorted({rate_of(record) for record in records.all})


def _seeds_of_all(records: Records) -> set[int]:
    """The seeds that ended at every rate where any seed did; rates are compared on these only."""
    ended = [losses for rate in _all_rates(records) if (losses := at_rate(records, rate).final_losses())]
    return set.intersection(*map(set, ended)) if ended else set()


def best_rate(records: Records) -> float | None:
    """The rate with the fewest diverged runs and, among those, the lowest mean final loss.

    Only seeds that all rates have count. None if no run has a finite loss.
    """
    seeds = _seeds_of_all(records)
    ranks: dict[float, tuple[int, float]] = {}
    for rate in _all_rates(records):
        losses = at_rate(records, rate).final_losses()
        finite = [losses[seed] for seed in seeds if math.isfinite(losses.get(seed, math.inf))]
        if finite:
            ranks[rate] = len(seeds) - len(finite), math.fsum(finite) / len(finite)
    return min(ranks, key=ranks.__getitem__, default=None)


def _best_rates(records: Records) -> BySeed:
    """The best rate of each seed whose runs have all ended; NaN if it is not between two worse ones.

    A best rate on the edge depends on where the grid was placed, not on which rate is best.
    """
    rates = _all_rates(records)
    by_rate = [at_rate(records, rate).final_losses() for rate in rates]
    best = {}
    for seed in sorted(set[int]().union(*by_rate)):
        if not all(seed in losses for losses in by_rate):
            continue
        losses = [by_seed[seed] for by_seed in by_rate]
        place = losses.index(min(losses))
        is_inside = 0 < place < len(rates) - 1 and losses[place] < losses[place + 1]
        best[seed] = rates[place] if is_inside else math.nan
    return best


def losses_at_best(records: Records) -> BySeed:
    """The final losses at the best rate; infinite if runs diverged at every rate."""
    best = best_rate(records)
    if best is None:
        return dict.fromkeys(_seeds_of_all(records), math.inf)
    return at_rate(records, best).final_losses()


def rates_chart(records: Records, place: int, panel: str) -> Chart:
    """The final loss against the learning rate, a line for each series."""
    lines = {}
    for series in records.series:
        runs = records.of(series=series)
        by_seed = {
            seed: sorted(
                (rate_of(record), loss)
                for record in runs.all
                if record.config.seed == seed
                and (loss := record.final_loss()) is not None
                and math.isfinite(loss)
            )
            for seed in sorted(_seeds_of_all(runs))
        }
        lines[series] = [
            (f"{series} seed {seed}", points, False) for seed, points in by_seed.items() if points
        ]
    return line_chart(
        {series: points for series, points in lines.items() if points},
        records.optimizers,
        Axis("peak learning rate", ".1~e", logarithmic=True),
        LOSS,
        name=f"rates-{place}",
        title=f"Final validation loss against the learning rate, {panel}",
        caption="Means over the seeds that all rates have. Runs that diverged are not drawn; the table "
        "counts them.",
    )


def rates_charts(records: Records) -> tuple[Chart, ...]:
    """The same for each panel."""
    return tuple(
        rates_chart(records.of(panel=panel), place, panel)
        for place, panel in enumerate(records.panels, start=1)
    )


def grid_table(records: Records, scale: Scale) -> Table:
    """Every learning rate of every series with its losses and logits; the best is marked."""
    papers = {setup.name: setup for setup in scale.gpt2 if setup.paper}
    rows = []
    for panel, series, grid in records.by_panel_and_series():
        best, rates = best_rate(grid), _all_rates(grid)
        for rate in rates:
            runs, remark = at_rate(grid, rate), ""
            if rate == best and len(rates) > 1:
                remark = "best, on the edge of the grid" if rate in (rates[0], rates[-1]) else "best"
            name = runs.all[0].config.optimizer.name
            is_paper = panel in papers and math.isclose(papers[panel].rates[name], rate)
            rows.append(
                (
                    panel,
                    series,
                    runs.statuses,
                    remark,
                    f"{rate:g}" + (" (the paper's)" if is_paper else ""),
                    spread_text(runs.final_losses()),
                    spread_text(runs.by_seed(lambda record: record.largest(MAX_LOGIT)), ".4g"),
                )
            )
    head = ("Model", "Optimizer", "Runs", "", "Peak learning rate", "Validation loss", "Largest logit")
    return Table(head, tuple(rows), num_text=4)


def _best_rate_below(records: Records, scale: Scale, lower: str, upper: str, panel: str) -> ClaimComparison:
    """The comparison of two series' best rates."""
    papers = {setup.name: setup.rates for setup in scale.gpt2 if setup.paper}
    names = {display: name for name, display in DISPLAY_NAMES.items()}
    paper = papers.get(panel)
    below, above = (
        {seed: math.log10(rate) for seed, rate in _best_rates(records.of(panel=panel, series=series)).items()}
        for series in (lower, upper)
    )
    return paired(
        f"{lower}'s best rate below {upper}'s{records.panel_suffix(panel)}",
        below,
        above,
        paper=f"{paper[names[lower]]:g} against {paper[names[upper]]:g}" if paper else "",
        unit="powers of ten",
        empty_reason="no seed has both best rates inside their grids",
    )


def _grid_result(records: Records, scale: Scale, claim: Verdict) -> Analysis:
    return Analysis(
        table=grid_table(records, scale),
        charts=rates_charts(records),
        verdicts=(claim,),
        notes=(
            (
                "A seed's best rate counts only if it lies inside the grid, with a worse one on each side: "
                "each optimizer has a separate grid, so a best rate on the edge depends on where the grid "
                "was placed, not on which rate is best."
            ),
            (
                "The other entries use the rate in the middle of each grid. If another is best, or one on "
                "the edge, `merit sweep` can extend the grid."
            ),
        ),
    )


def _table4(records: Records, scale: Scale) -> Analysis:
    claim = Verdict(
        claim="LAMB and MERIT want higher learning rates than AdamW (they are relative to the weights), Lion "
        "a lower one.",
        source="table 4",
        comparisons=tuple(
            _best_rate_below(records, scale, lower, upper, panel)
            for panel in records.panels
            for lower, upper in (("AdamW", "LAMB"), ("AdamW", "MERIT"), ("Lion", "AdamW"))
        ),
    )
    return _grid_result(records, scale, claim)


def _llama_rates(records: Records, scale: Scale) -> Analysis:
    claim = Verdict(
        claim="On Llama, too, LAMB and MERIT want higher learning rates than AdamW.",
        source="table 4, which has GPT-2 alone",
        comparisons=tuple(
            _best_rate_below(records, scale, "AdamW", upper, panel)
            for panel in records.panels
            for upper in ("LAMB", "MERIT")
        ),
    )
    return _grid_result(records, scale, claim)


def _qk_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    setup = scale.gpt2[0]
    trials = []
    for seed in range(seeds):
        trials.append(scale.trial(setup, "merit", seed))
        for rate in [*rates_around(setup.rates["adamw"]), float(f"{4 * setup.rates['adamw']:.3g}")]:
            for qk_norm, series in ((False, "AdamW"), (True, _QK_NORM)):
                trials.append(scale.trial(setup, "adamw", seed, lr=rate, qk_norm=qk_norm, series=series))
    return trials


def _fig8(records: Records, _: Scale) -> Analysis:
    plain, normed, merit = (records.of(series=series) for series in ("AdamW", _QK_NORM, "MERIT"))
    highest = _all_rates(normed)[-1]
    wider = Verdict(
        claim="QK-Norm lets AdamW use higher learning rates.",
        source="figure 8",
        comparisons=(
            paired(
                f"at the highest rate, {highest:g}, with QK-Norm below without",
                at_rate(normed, highest).final_losses(),
                at_rate(plain, highest).final_losses(),
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
                losses_at_best(plain),
                losses_at_best(normed),
                unit="nats",
            ),
            paired(
                "MERIT below AdamW with QK-Norm at its best rate",
                merit.final_losses(),
                losses_at_best(normed),
                unit="nats",
            ),
        ),
    )
    return Analysis(
        table=rate_table(records),
        charts=rates_charts(records),
        verdicts=(wider, worse),
        notes=("QK-Norm here is RMSNorm with a learned scale on each head's queries and keys.",),
    )


def rate_table(records: Records) -> Table:
    """Every learning rate of every series, with its losses."""
    rows = []
    for panel, series, grid in records.by_panel_and_series():
        for rate in _all_rates(grid):
            runs = at_rate(grid, rate)
            rows.append((panel, series, f"{rate:g}", runs.statuses, spread_text(runs.final_losses())))
    return Table(
        ("Model", "Optimizer", "Peak learning rate", "Runs", "Validation loss"), tuple(rows), num_text=4
    )


ENTRIES = (
    PaperEntry(
        name="fig8",
        title="Figure 8: QK-Norm against MERIT",
        shows="AdamW with and without QK-Norm at several learning rates, and MERIT",
        trials=_qk_trials,
        analyse=_fig8,
        is_grid=True,
    ),
    PaperEntry(
        name="table4",
        title="Table 4: learning rates",
        shows="grids of learning rates, per optimizer and size",
        trials=lambda scale, seeds: _grid(scale.gpt2, _OPTIMIZERS, scale, seeds),
        analyse=_table4,
        is_grid=True,
    ),
    PaperEntry(
        name="llama-rates",
        title="Learning rates on Llama",
        shows="beyond the paper: grids around the learning rates of figure 6, which the paper does not give",
        trials=lambda scale, seeds: _grid(scale.llama, WATCHED, scale, seeds),
        analyse=_llama_rates,
        is_grid=True,
    ),
)
