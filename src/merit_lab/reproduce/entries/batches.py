"""How far the batch can grow: figure 1, and the same for wide and for deep models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from merit_lab.report.tables import NOTHING, Table
from merit_lab.reproduce.entries.losses import spread_text, status_counts
from merit_lab.reproduce.entry import Entry, Result
from merit_lab.reproduce.records import BySeed, Records
from merit_lab.reproduce.scale import WATCHED, Scale, Setting, Shown
from merit_lab.reproduce.verdict import Comparison, Verdict, paired
from merit_lab.study.charts import Axis, Chart, line_chart

_STILL_PAYS = 0.8  # a larger batch pays if it takes at most this share of the steps of the one before
_NO_SHARE = "with no seed did both get to the target with the smallest batch"
_TARGET = (
    "The target is the lowest validation loss that every run ended at or below; those that diverged are not "
    "asked. All runs have the same number of tokens; learning rates go by the square root of the batch."
)


def _trials(
    scale: Scale, setting: Setting, batches: Sequence[int], optimizers: Sequence[str], seeds: int
) -> list[Shown]:
    return [
        scale.trial(setting.with_batch(batch), name, seed, panel=setting.model_name)
        for seed in range(seeds)
        for batch in batches
        for name in optimizers
    ]


def _batches(records: Records) -> list[int]:
    return sorted({own.config.batch for own in records.all})


def _at(records: Records, batch: int) -> Records:
    return records.where(lambda own: own.config.batch == batch)


def target_loss(records: Records) -> float:
    """The lowest loss that every run ended at or below; those that diverged are not asked.

    Minus infinity, which no run gets to, where none has finished.
    """
    ends = (own.final_loss() for own in records.all)
    return max((end for end in ends if end is not None and math.isfinite(end)), default=-math.inf)


def _steps(records: Records, batch: int, target: float) -> BySeed:
    return _at(records, batch).by_seed(lambda own: own.steps_to(target))


def efficiency(records: Records, target: float) -> BySeed:
    """By seed: tokens to the target with the smallest batch over those with the largest; 1 is ideal.

    NaN where the smallest batch did not get there, so that there is nothing to compare with, or where the
    largest was there before the first step.
    """
    smallest, *_, largest = _batches(records)
    few, many = _steps(records, smallest, target), _steps(records, largest, target)
    shares = {}
    for seed in few.keys() & many.keys():
        is_known = math.isfinite(few[seed]) and many[seed] > 0
        # The largest batch may not have got there: its steps are infinite, and the share is zero.
        shares[seed] = (few[seed] * smallest) / (many[seed] * largest) if is_known else math.nan
    return shares


def largest_useful_batch(records: Records, target: float) -> int | None:
    """The largest batch up to which each one took clearly fewer steps than the one before."""
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
        own = records.of(series=series)
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for batch in _batches(own):
            for seed, steps in _steps(own, batch, target).items():
                if math.isfinite(steps) and steps > 0:
                    by_seed.setdefault(seed, []).append((batch, steps))
        lines[series] = [(f"{series} seed {seed}", points, False) for seed, points in by_seed.items()]
    batches = _batches(records)
    # In sequences: where runs with the smallest batch diverged, a line begins with a larger one.
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
            own = _at(records.of(series=series), batch)
            steps = _steps(own, batch, target)
            num_short = sum(map(math.isinf, steps.values()))
            text = spread_text(steps, ".0f")
            if num_short:
                text = f"not reached by {num_short} of {len(steps)}" + (
                    "" if text == NOTHING else f"; {text}"
                )
            rows.append(
                (panel, series, status_counts(own), str(batch), spread_text(own.final_losses()), text)
            )
    return rows


_HEAD = ("Model", "Optimizer", "Runs", "Batch", "Validation loss", "Steps to the target")


def _model_trials(scale: Scale, seeds: int) -> list[Shown]:
    """Every model with the same multiples of its own batch."""
    first, *others = scale.gpt2[:2]
    return [
        trial
        for setting in (first, *others)
        for trial in _trials(
            scale,
            setting,
            [batch * setting.batch // first.batch for batch in scale.batches],
            WATCHED,
            seeds,
        )
    ]


def _fig1(records: Records, _: Scale) -> Result:
    rows: list[tuple[str, ...]] = []
    charts = []
    fewer: list[Comparison] = []
    nearer: list[Comparison] = []
    for place, panel in enumerate(records.panels, start=1):
        own = records.of(panel=panel)
        target = target_loss(own)
        rows += _rows(own, target, panel)
        if math.isfinite(target):
            charts.append(_chart(own, target, f"steps-{place}", f"Steps against batch, {panel}"))
        largest, merit, where = _batches(own)[-1], own.of(series="MERIT"), records.where_in_words(panel)
        for rival in ("AdamW", "LAMB"):
            theirs = own.of(series=rival)
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
                    silence=_NO_SHARE,
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
    return Result(
        table=Table(_HEAD, tuple(rows), num_text=3), charts=tuple(charts), verdicts=verdicts, notes=(_TARGET,)
    )


def _width(records: Records, scale: Scale) -> Result:
    wide, deep = (own.name for own in scale.shapes)
    rows: list[tuple[str, ...]] = []
    charts = []
    shares: dict[tuple[str, str], BySeed] = {}
    notes = [_TARGET + " Each shape has its own target."]
    for place, panel in enumerate((wide, deep), start=1):
        own = records.of(panel=panel)
        target = target_loss(own)
        rows += _rows(own, target, panel)
        shares |= {(panel, series): efficiency(own.of(series=series), target) for series in own.series}
        if not math.isfinite(target):
            continue
        charts.append(_chart(own, target, f"steps-{place}", f"Steps against batch, {panel}"))
        for series in own.series:
            useful = largest_useful_batch(own.of(series=series), target)
            words = NOTHING if useful is None else str(useful)
            notes.append(
                f"{series}, {panel}: up to batch {words} each larger batch took at least "
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
                silence=_NO_SHARE,
            )
            for series in records.series
        ),
    )
    return Result(
        table=Table(_HEAD, tuple(rows), num_text=3),
        charts=tuple(charts),
        verdicts=(claim,),
        notes=tuple(notes),
    )


def _shape_trials(scale: Scale, seeds: int) -> list[Shown]:
    return [
        trial
        for shape in scale.shapes
        for trial in _trials(scale, shape, scale.shape_batches, ("adamw", "merit"), seeds)
    ]


ENTRIES = (
    Entry(
        name="fig1",
        title="Figure 1: steps against batch",
        shows="steps to a validation loss against the batch size, with the line of ideal scaling",
        trials=_model_trials,
        analyse=_fig1,
        is_grid=True,
    ),
    Entry(
        name="width",
        title="Wide or deep: how far the batch can grow",
        shows="beyond the paper: steps against batch for a wide and a deep model of one size",
        trials=_shape_trials,
        analyse=_width,
        is_grid=True,
    ),
)
