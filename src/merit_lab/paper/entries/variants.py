"""Variants of MERIT suggested by its statistics; none is from the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from merit_lab.paper.entries.losses import below, loss_charts, loss_table
from merit_lab.paper.entries.rates import best_rate, rate_of, rate_table
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.merit_variant import MERITVariant
from merit_lab.paper.records import Records
from merit_lab.paper.setups import EntryTrial, Scale, Setup
from merit_lab.paper.verdict import Verdict

_EUCLIDEAN = "MERIT, Euclidean norms"
_OURS = f"{MERITVariant.__module__}:{MERITVariant.__name__}"


class _Variant(NamedTuple):
    """A change to MERIT, in words and as an override of an optimizer that supports it."""

    series: str
    change: str
    optimizer: str
    override: Callable[[Setup], str]


VARIANTS = (
    _Variant(
        "MERIT, embeddings with one ratio",
        "with one ratio for a whole embedding, whose rare rows see few gradients",
        "merit",
        lambda _: "*embedding*:element_wise=false",
    ),
    _Variant(
        "MERIT, ratios by head",
        "with ratios for each attention head",
        _OURS,
        lambda setup: f"*query_key_value*:rows={setup.model.head_width}",
    ),
    _Variant(
        "MERIT, smoothed ratios",
        "with ratios from the update's norms of ten steps, not of one",
        _OURS,
        lambda _: "*:smoothing=0.9",
    ),
)


def _trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    setup = scale.gpt2[0]
    rate = setup.rates["merit"]
    return [
        *scale.trials([setup], ("merit",), seeds),
        *(
            scale.trial(
                setup,
                variant.optimizer,
                seed,
                lr=rate,
                overrides=(variant.override(setup),),
                series=variant.series,
            )
            for seed in range(seeds)
            for variant in VARIANTS
        ),
    ]


def _variants(records: Records, scale: Scale) -> Analysis:
    claims = tuple(
        Verdict(
            claim=f"MERIT ends lower {variant.change}.",
            source="a guess of ours",
            comparisons=(below(records, variant.series, "MERIT", scale.gpt2[0].name),),
        )
        for variant in VARIANTS
    )
    return Analysis(
        table=loss_table(records, {}),
        charts=loss_charts(records),
        verdicts=claims,
        notes=("All variants have MERIT's learning rate.",),
    )


def _euclidean_rates(setup: Setup) -> list[float]:
    """LAMB's rate, since steps with these norms go as far as LAMB's, and MERIT's unless it is close."""
    lamb, merit = setup.rates["lamb"], setup.rates["merit"]
    return [lamb] if math.isclose(lamb, merit, rel_tol=0.25) else sorted([lamb, merit])


def _norm_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    setups = scale.gpt2[:2]
    return [
        *scale.trials(setups, ("lamb", "merit"), seeds),
        *(
            scale.trial(setup, "merit", seed, lr=rate, overrides=('*:norm="l2"',), series=_EUCLIDEAN)
            for seed in range(seeds)
            for setup in setups
            for rate in _euclidean_rates(setup)
        ),
    ]


def _norm(records: Records, scale: Scale) -> Analysis:
    best = {
        setup.name: best_rate(records.of(panel=setup.name, series=_EUCLIDEAN)) or setup.rates["lamb"]
        for setup in scale.gpt2[:2]
    }
    at_best = records.where(
        lambda record: record.series != _EUCLIDEAN or rate_of(record) == best[record.panel]
    )
    claims = tuple(
        Verdict(
            claim=f"With Euclidean norms in its ratios MERIT ends below {rival}.",
            source="a guess of ours",
            comparisons=tuple(below(at_best, _EUCLIDEAN, rival, panel) for panel in records.panels),
        )
        for rival in ("MERIT", "LAMB")
    )
    return Analysis(
        table=rate_table(records),
        charts=loss_charts(at_best),
        verdicts=claims,
        notes=(
            (
                "With Euclidean norms MERIT is run at LAMB's learning rate, because its steps go as far, and "
                "at MERIT's if the two are far apart; the better one is compared and drawn."
            ),
        ),
    )


ENTRIES = (
    PaperEntry(
        name="norm",
        title="MERIT with Euclidean norms",
        shows="beyond the paper: MERIT's element-wise ratios with LAMB's norm, which measures steps of any "
        "shape alike",
        trials=_norm_trials,
        analyse=_norm,
    ),
    PaperEntry(
        name="variants",
        title="Variants of MERIT",
        shows="beyond the paper: MERIT with one ratio for embeddings, ratios by attention head, and "
        "smoothed ratios",
        trials=_trials,
        analyse=_variants,
    ),
)
