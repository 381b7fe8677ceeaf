"""How far the batch can grow: figure 1, and the same for wide and deep models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import BySeed, Records, spread_text
from merit_lab.paper.setups import WATCHED, EntryTrial, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict, paired
from merit_lab.study.charts import Axis, Chart, line_chart
from merit_lab.tables import NOTHING, Table

_STILL_PAYS = 0.8  # a larger batch pays if it takes at most this share of the steps of the one before
_NO_SHARE = "with every seed, one of the two missed the target with the smallest batch"
_TARGET = (
    "The target is the lowest validation loss that every run ended at or below, without those that diverged. "
    "All runs have the same number of tokens; learning rates scale with the square root of the batch."
)


def _trials(
    scale: Scale, setup: Setup, batches: Sequence[int], optimizers: Sequence[str], seeds: int
) -> list[EntryTrial]:
    return [
        scale.trial(setup.with_batch(batch), name, seed, panel=setup.model_name)
        for seed in range(seeds)
        for batch in batches
        for name in optimizers
    ]


def _batches(records: Records) -> list[int]:
    return sorted({record.config.batch for record in records.all})


def _at(records: Records, batch: int) -> Records:
    return records.where(lambda record: record.config.batch == batch)


def target_loss(records: Records) -> float:
    """The lowest loss that every run ended at or below, without those that diverged.

    Minus infinity, which no run reaches, if none has finished.
    """
    ends = (record.final_loss() for record in records.all)
    return max((end for end in ends if end is not None and math.isfinite(end)), default=-math.inf)


def _steps(records: Records, batch: int, target: float) -> BySeed:
    return _at(records, batch).by_seed(lambda record: record.steps_to(target))


def efficiency(records: Records, target: float) -> BySeed:
    """By seed: tokens to the target with the smallest batch over those with the largest; 1 is ideal.

    NaN if the smallest batch did not reach it, so there is no baseline, or if the largest batch was there
    before the first step.
    """
    smallest, *_, largest = _batches(records)
    few, many = _steps(records, smallest, target), _steps(records, largest, target)
    shares = {}
    for seed in few.keys() & many.keys():
        is_known = math.isfinite(few[seed]) and many[seed] > 0
        # If the largest batch did not reach the target, its steps are infinite and the share is zero.
        shares[seed] = (few[seed] * smallest) / (many[seed] * largest) if is_known else math.nan
    return shares


def largest_useful_batch(records: Records, target: float) -> int | None:
    """The largest batch such that each batch up to it took clearly fewer steps than the one before."""
    useful = None
    before = math.inf
    for batch in _batches(records):
        values = _steps(records, batch, target).values()
        steps = statistics.fmean(values) if values else math.inf
        if not steps <= _STILL_PAYS * before or math.isinf(steps):
            break
        useful, before = batch, steps
    return useful


def _chart(records: Records, target: float, name: str, title: str) -> Chart:
    lines = {}
    for series in records.series:
        runs = records.of(series=series)
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for batch in _batches(runs):
            for seed, steps in _steps(runs, batch, target).items():
                if math.isfinite(steps) and steps > 0:
                    by_seed.setdefault(seed, []).append((batch, steps))
        lines[series] = [(f"{series} seed {seed}", points, False) for seed, points in by_seed.items()]
    batches = _batches(records)
    # In sequences, because a line starts at a larger batch if runs with the smallest diverged.
    first = [math.prod(points[0]) for group in lines.values() for _, points, _ in group]
    ideal = [(batch, min(first) / batch) for batch in batches] if first else []
    return line_chart(
        lines,
        records.optimizers,
        Axis("batch (sequences)", "~d", logarithmic=True, ticks=tuple(batches)),
        Axis("steps to the target", ".3~s", logarithmic=True),
        name=name,
        title=title,
        caption=f"Steps to a validation loss of {target:.3f}. The dotted line is ideal: twice the batch, "
        "half the steps.",
        ideal=ideal,
    )


def _rows(records: Records, target: float, panel: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for series in records.series:
        for batch in _batches(records):
            runs = _at(records.of(series=series), batch)
            steps = _steps(runs, batch, target)
            num_short = sum(map(math.isinf, steps.values()))
            text = spread_text(steps, ".0f")
            if num_short:
                text = f"not reached by {num_short} of {len(steps)}" + (
                    "" if text == NOTHING else f"; {text}"
                )
            rows.append((panel, series, runs.statuses, str(batch), spread_text(runs.final_losses()), text))
    return rows


_HEAD = ("Model", "Optimizer", "Runs", "Batch", "Validation loss", "Steps to the target")


def _model_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    """Every model with the same multiples of its batch."""
    first, *others = scale.gpt2[:2]
    return [
        trial
        for setup in (first, *others)
        for trial in _trials(
            scale,
            setup,
            [batch * setup.batch // first.batch for batch in scale.batches],
            WATCHED,
            seeds,
        )
    ]


def _fig1(records: Records, _: Scale) -> Analysis:
    rows: list[tuple[str, ...]] = []
    charts = []
    fewer: list[ClaimComparison] = []
    nearer: list[ClaimComparison] = []
    for place, panel in enumerate(records.panels, start=1):
        runs = records.of(panel=panel)
        target = target_loss(runs)
        rows += _rows(runs, target, panel)
        if math.isfinite(target):
            charts.append(_chart(runs, target, f"steps-{place}", f"Steps against batch, {panel}"))
        largest, merit, where = _batches(runs)[-1], runs.of(series="MERIT"), records.panel_suffix(panel)
        for rival in ("AdamW", "LAMB"):
            theirs = runs.of(series=rival)
            fewer.append(
                paired(
                    f"MERIT below {rival} with batch {largest}{where}",
                    _steps(merit, largest, target),
                    _steps(theirs, largest, target),
                    unit="steps",
                )
            )
            nearer.append(
                paired(
                    f"{rival}'s share of ideal scaling below MERIT's{where}",
                    efficiency(theirs, target),
                    efficiency(merit, target),
                    empty_reason=_NO_SHARE,
                )
            )
    verdicts = (
        Verdict(
            claim="At the largest batch MERIT needs the fewest steps to a given loss.",
            source="figure 1",
            comparisons=tuple(fewer),
        ),
        Verdict(
            claim="With growing batches MERIT stays nearer to ideal scaling than AdamW and LAMB.",
            source="figure 1 and section 5.2",
            comparisons=tuple(nearer),
        ),
    )
    return Analysis(
        table=Table(_HEAD, tuple(rows), num_text=3), charts=tuple(charts), verdicts=verdicts, notes=(_TARGET,)
    )


def _width(records: Records, scale: Scale) -> Analysis:
    wide, deep = (shape.name for shape in scale.shapes)
    rows: list[tuple[str, ...]] = []
    charts = []
    shares: dict[tuple[str, str], BySeed] = {}
    notes = [_TARGET + " Each shape has a separate target."]
    for place, panel in enumerate((wide, deep), start=1):
        runs = records.of(panel=panel)
        target = target_loss(runs)
        rows += _rows(runs, target, panel)
        shares |= {(panel, series): efficiency(runs.of(series=series), target) for series in runs.series}
        if not math.isfinite(target):
            continue
        charts.append(_chart(runs, target, f"steps-{place}", f"Steps against batch, {panel}"))
        for series in runs.series:
            useful = largest_useful_batch(runs.of(series=series), target)
            largest = NOTHING if useful is None else str(useful)
            notes.append(
                f"{series}, {panel}: up to batch {largest} each larger batch took at least "
                f"{1 - _STILL_PAYS:.0%} fewer steps; {spread_text(shares[panel, series], '.0%')} of ideal "
                "scaling from the smallest batch to the largest."
            )
    claim = Verdict(
        claim="With as many parameters, a wide and shallow model can use larger batches than a narrow and "
        "deep one.",
        source="not the paper's: a hypothesis from work on large batches",
        comparisons=tuple(
            paired(
                f"{series}: share of ideal scaling of deep below that of wide",
                shares[deep, series],
                shares[wide, series],
                empty_reason=_NO_SHARE,
            )
            for series in records.series
        ),
    )
    return Analysis(
        table=Table(_HEAD, tuple(rows), num_text=3),
        charts=tuple(charts),
        verdicts=(claim,),
        notes=tuple(notes),
    )


def _shape_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    return [
        trial
        for shape in scale.shapes
        for trial in _trials(scale, shape, scale.shape_batches, ("adamw", "merit"), seeds)
    ]


ENTRIES = (
    PaperEntry(
        name="fig1",
        title="Figure 1: steps against batch",
        shows="steps to a validation loss against the batch size, with the line of ideal scaling",
        trials=_model_trials,
        analyse=_fig1,
        is_grid=True,
    ),
    PaperEntry(
        name="width",
        title="Wide or deep: how far the batch can grow",
        shows="beyond the paper: steps against batch for a wide and a deep model of one size",
        trials=_shape_trials,
        analyse=_width,
        is_grid=True,
    ),
)
