"""All entries of `merit reproduce`: the paper's figures and tables, and later questions as rows."""

from __future__ import annotations

from collections.abc import Sequence

from merit_lab.checks import check_choice
from merit_lab.paper import drawing
from merit_lab.paper import entry as e
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, below, same, versus
from merit_lab.paper.entry import Entry
from merit_lab.paper.merit_variant import MERITVariant
from merit_lab.paper.of_paper import OF_PAPER
from merit_lab.paper.plan import WATCHED, Runs

VARIANT = f"{MERITVariant.__module__}:{MERITVariant.__name__}"
EUCLIDEAN = "MERIT, Euclidean norms"
LONG = {name: f"{name}, warm-up 10%" for name in ("AdamW", "LAMB", "MaxLAMB", "MERIT")}
losses_over_tokens = drawing.curves("Validation loss", drawing.LOSS, q.losses, by="model", against="tokens")

_LATER = (
    Entry(
        "llama-rates",
        "grids around the learning rates of figure 6, which the paper does not give",
        Runs("llama", WATCHED, factors=e.GRID),
        Claim(
            "On Llama, too, LAMB and MERIT want higher learning rates than AdamW.",
            below("AdamW", "LAMB", "MERIT", of=q.BEST_RATE),
            "table 4, which has GPT-2 alone",
        ),
        columns=(q.LOSS, q.LARGEST_LOGIT),
        charts=(drawing.rates,),
        note=e.INSIDE,
        is_grid=True,
    ),
    Entry(
        "reference",
        "validation loss with large batches against AdamW's with a small one",
        Runs("of references", e.FOUR),
        Runs("references", ("adamw",), series=e.REFERENCE),
        Claim(
            "With a large batch MERIT ends no higher than AdamW with a small one, after as many tokens.",
            below("MERIT", e.REFERENCE),
            "abstract and table 1, which say so of accuracies",
        ),
        charts=(losses_over_tokens,),
        rows=e.WITH_BATCH,
        note=e.MORE,
    ),
    Entry(
        "horizon",
        "longer training: loss and logits of AdamW, LAMB, maxLAMB and MERIT after more tokens",
        Runs("first", e.FOUR),
        Runs("longer", e.FOUR),
        Claim(
            "With several times the tokens, too, MERIT ends below AdamW, LAMB and maxLAMB.",
            below("MERIT", "AdamW", "LAMB", "MaxLAMB", part="longer"),
            "figure 4 and table 3, which have one length for each model",
        ),
        Claim(
            "And its largest logits stay below AdamW's and LAMB's there.",
            below("MERIT", "AdamW", "LAMB", of=q.FIRST, part="longer")
            + below("MERIT", "AdamW", "LAMB", of=q.ALL, part="longer"),
            "figures 2 and 14, which have one length",
        ),
        columns=(q.LOSS, q.FIRST, q.ALL),
        charts=(e.losses, e.first_logit),
        note=e.LARGEST,
        is_grid=True,
    ),
    Entry(
        "doubled",
        "validation loss with twice the batch, at separate learning rates",
        Runs("single batch", e.FIVE),
        Runs("twice the batch", e.FIVE, factors=e.GRID, seeds=1),
        Runs("twice the batch", e.FIVE),
        Claim(
            "With twice the batch, too, MERIT ends below AdamW, LAMB, maxLAMB and Lion, each at its "
            "middle rate.",
            below("MERIT", "AdamW", "LAMB", "MaxLAMB", "Lion", part="twice the batch", factor=1.0),
            "figure 4 and table 3, which have one batch for each model",
        ),
        Claim(
            "After as many tokens every optimizer ends higher with twice the batch, which is half the steps.",
            same((*LONG, "Lion"), "single batch", "twice the batch", factor=1.0),
        ),
        columns=(q.LOSS, q.LARGEST_LOGIT),
        charts=(e.losses, drawing.rates),
        note="Only the first seed has the grid. The claims use all seeds, at the rate in its middle.",
    ),
    Entry(
        "variants",
        "MERIT with one ratio for embeddings, ratios by attention head, and smoothed ratios",
        Runs("first", ("merit",)),
        Runs(
            "first",
            ("merit",),
            series="One ratio for embeddings",
            overrides="*embedding*:element_wise=false",
        ),
        Runs(
            "first",
            (VARIANT,),
            rate_of="merit",
            series="Ratios by head",
            overrides="*query_key_value*:rows={model.head_width}",
        ),
        Runs("first", (VARIANT,), rate_of="merit", series="Smoothed ratios", overrides="*:smoothing=0.9"),
        Claim(
            "MERIT ends lower with one ratio for a whole embedding, whose rare rows see few gradients.",
            below("One ratio for embeddings", "MERIT"),
        ),
        Claim("MERIT ends lower with ratios for each attention head.", below("Ratios by head", "MERIT")),
        Claim(
            "MERIT ends lower with ratios from the update's norms of ten steps, not of one.",
            below("Smoothed ratios", "MERIT"),
        ),
        note=e.MERITS_RATE,
    ),
    Entry(
        "norm",
        "MERIT's element-wise ratios with LAMB's norm, which measures steps of any shape alike",
        Runs("two", ("lamb-uncorrected", "merit")),
        Runs("two", ("merit",), rate_of="lamb-uncorrected", overrides='*:norm="l2"', series=EUCLIDEAN),
        Runs("two", ("merit",), overrides='*:norm="l2"', series=EUCLIDEAN),
        Claim(
            "With Euclidean norms in its ratios MERIT ends below MERIT.",
            below(EUCLIDEAN, "MERIT", of=q.LOSS_AT_BEST),
        ),
        Claim(
            "With Euclidean norms in its ratios MERIT ends below LAMB.",
            below(EUCLIDEAN, "LAMB", of=q.LOSS_AT_BEST),
        ),
        note=(
            "With Euclidean norms MERIT is run at LAMB's learning rate, because its steps go as far, and at "
            "MERIT's; the better one is compared."
        ),
    ),
    Entry(
        "logits",
        "largest attention logit at each size with AdamW, LAMB, maxLAMB, MERIT and Lion",
        Runs("two", e.FIVE),
        Claim(
            "At any size MERIT's largest logits stay below LAMB's, each at its best learning rate.",
            below("MERIT", "LAMB", of=q.FIRST) + below("MERIT", "LAMB", of=q.ALL),
            "ours; figures 2 and 14 have one size",
        ),
        columns=(q.FIRST, q.MIDDLE, q.ALL),
        charts=(e.first_logit,),
        note=e.LARGEST,
    ),
    Entry(
        "reach",
        "how far a step goes: a step's relative change of the weights against the learning rate",
        Runs("two", ("lamb-uncorrected", "maxlamb", "merit")),
        Claim(
            "For their learning rate, steps of MERIT and maxLAMB go further at the beginning than at "
            "the end: while all elements of an update are alike, the largest is a poor measure of it.",
            versus("MERIT", q.REACH["last step"], q.REACH["first step"])
            + versus("MaxLAMB", q.REACH["last step"], q.REACH["first step"]),
        ),
        columns=tuple(q.REACH.values()),
        charts=(
            drawing.curves(
                "How far a step goes", "relative change / learning rate", q.reach_curve, zero=True
            ),
        ),
    ),
    Entry(
        "warmup",
        "five times the warm-up, at twice and four times the learning rates too",
        Runs("two", e.FOUR, factors=(1.0, 2.0)),
        Runs(
            "two",
            e.FOUR,
            factors=(1.0, 2.0, 4.0),
            changes={"optimizer.warmup": 0.1},
            series="{name}, warm-up 10%",
        ),
        Claim(
            "With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
            "their learning rate.",
            below(LONG["MERIT"], "MERIT", factor=2.0) + below(LONG["MaxLAMB"], "MaxLAMB", factor=2.0),
        ),
        Claim(
            "And MERIT ends lower than with the short one, each at its best rate.",
            below(LONG["MERIT"], "MERIT", of=q.LOSS_AT_BEST),
        ),
        Claim(
            "With the longer warm-up MERIT ends below AdamW and LAMB that have it too, each at its best "
            "rate.",
            below(LONG["MERIT"], LONG["AdamW"], LONG["LAMB"], of=q.LOSS_AT_BEST),
        ),
        charts=(drawing.rates,),
        is_grid=True,
    ),
    Entry(
        "width",
        "wide or deep: steps against batch for two models of one size",
        Runs("wide", ("adamw", "merit")),
        Runs("deep", ("adamw", "merit")),
        Claim(
            "With as many parameters, a wide and shallow model can use larger batches than a narrow and "
            "deep one.",
            same(("AdamW", "MERIT"), "deep", "wide", of=q.EFFICIENCY),
            "not the paper's: a hypothesis from work on large batches",
            within="",
        ),
        columns=(q.LOSS, q.STEPS),
        charts=(drawing.steps_against_batch,),
        rows=e.WITH_BATCH,
        note=e.TARGET,
        is_grid=True,
    ),
)

ENTRIES = {entry.name: entry for entry in (*OF_PAPER, *_LATER)}
"""All entries by name, the paper's first."""


def choose(names: Sequence[str]) -> tuple[Entry, ...]:
    """The entries with these names, in the paper's order; "all" selects every entry."""
    for name in names:
        check_choice("the entry", name, ("all", *ENTRIES))
    return tuple(entry for name, entry in ENTRIES.items() if name in names or "all" in names)
