"""Variants of MERIT that its statistics suggest, none of them the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from merit_lab.reproduce.entries.losses import below, loss_charts, loss_table, trials_of
from merit_lab.reproduce.entries.rates import best_rate, rate_of, rate_table
from merit_lab.reproduce.entry import Entry, Result
from merit_lab.reproduce.merit_variant import MERITVariant
from merit_lab.reproduce.records import Records
from merit_lab.reproduce.scale import Scale, Setting, Shown
from merit_lab.reproduce.verdict import Verdict

_EUCLIDEAN = "MERIT, Euclidean norms"
_OURS = f"{MERITVariant.__module__}:{MERITVariant.__name__}"


class _Variant(NamedTuple):
    """What is changed, in words and as an override of the optimizer that can be changed so."""

    series: str
    change: str
    optimizer: str
    override: Callable[[Setting], str]


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
        lambda setting: f"*query_key_value*:rows={setting.model.head_width}",
    ),
    _Variant(
        "MERIT, smoothed ratios",
        "with ratios from the update's norms of ten steps, not of one",
        _OURS,
        lambda _: "*:smoothing=0.9",
    ),
)


def _trials(scale: Scale, seeds: int) -> list[Shown]:
    setting = scale.gpt2[0]
    rate = setting.rates["merit"]
    return [
        *trials_of([setting], ("merit",), scale, seeds),
        *(
            scale.trial(
                setting, own.optimizer, seed, lr=rate, overrides=(own.override(setting),), series=own.series
            )
            for seed in range(seeds)
            for own in VARIANTS
        ),
    ]


def _variants(records: Records, scale: Scale) -> Result:
    claims = tuple(
        Verdict(
            claim=f"MERIT ends lower {own.change}.",
            source="a guess of ours",
            comparisons=(below(records, own.series, "MERIT", scale.gpt2[0].name),),
        )
        for own in VARIANTS
    )
    return Result(
        table=loss_table(records, {}),
        charts=loss_charts(records),
        verdicts=claims,
        notes=("All variants have MERIT's learning rate.",),
    )


def _euclidean_rates(setting: Setting) -> list[float]:
    """LAMB's, for with these norms a step goes as far as LAMB's; and MERIT's where that is not nearly it."""
    lamb, merit = setting.rates["lamb"], setting.rates["merit"]
    return [lamb] if math.isclose(lamb, merit, rel_tol=0.25) else sorted([lamb, merit])


def _norm_trials(scale: Scale, seeds: int) -> list[Shown]:
    settings = scale.gpt2[:2]
    return [
        *trials_of(settings, ("lamb", "merit"), scale, seeds),
        *(
            scale.trial(setting, "merit", seed, lr=rate, overrides=('*:norm="l2"',), series=_EUCLIDEAN)
            for seed in range(seeds)
            for setting in settings
            for rate in _euclidean_rates(setting)
        ),
    ]


def _norm(records: Records, scale: Scale) -> Result:
    best = {
        own.name: best_rate(records.of(panel=own.name, series=_EUCLIDEAN)) or own.rates["lamb"]
        for own in scale.gpt2[:2]
    }
    at_best = records.where(lambda own: own.series != _EUCLIDEAN or rate_of(own) == best[own.panel])
    claims = tuple(
        Verdict(
            claim=f"With Euclidean norms in its ratios MERIT ends below {rival}.",
            source="a guess of ours",
            comparisons=tuple(below(at_best, _EUCLIDEAN, rival, panel) for panel in records.panels),
        )
        for rival in ("MERIT", "LAMB")
    )
    return Result(
        table=rate_table(records),
        charts=loss_charts(at_best),
        verdicts=claims,
        notes=(
            (
                "With Euclidean norms MERIT is run at LAMB's learning rate, for its steps go as far, and at "
                "MERIT's where the two are far apart; the better of both is compared and drawn."
            ),
        ),
    )


ENTRIES = (
    Entry(
        name="norm",
        title="MERIT with Euclidean norms",
        shows="beyond the paper: MERIT's element-wise ratios with LAMB's norm, which measures steps of any "
        "shape alike",
        trials=_norm_trials,
        analyse=_norm,
    ),
    Entry(
        name="variants",
        title="Variants of MERIT",
        shows="beyond the paper: MERIT with one ratio for embeddings, ratios by attention head, and "
        "smoothed ratios",
        trials=_trials,
        analyse=_variants,
    ),
)
