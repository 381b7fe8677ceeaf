"""All entries of `merit reproduce`: the paper's figures and tables, and later questions as rows."""

from __future__ import annotations

from collections.abc import Sequence

from merit_lab.paper import drawing
from merit_lab.paper import entry as e
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, below, same, versus
from merit_lab.paper.entry import Entry
from merit_lab.paper.merit_variant import MERITVariant
from merit_lab.paper.of_paper import OF_PAPER
from merit_lab.paper.plan import WATCHED, Runs
from merit_optim.spelling import did_you_mean

VARIANT = f"{MERITVariant.__module__}:{MERITVariant.__name__}"
EUCLIDEAN = "MERIT, Euclidean norms"
LONG = {name: f"{name}, warm-up 10%" for name in ("AdamW", "LAMB", "MaxLAMB", "MERIT")}
GUESS, OURS = "a guess of ours", "ours, not the paper's"
losses_over_tokens = drawing.curves("Validation loss", drawing.LOSS, q.losses, against="tokens")

_LATER = (
    Entry(
        "llama-rates",
        "grids around the learning rates of figure 6, which the paper does not give",
        (Runs("llama", WATCHED, factors=e.GRID),),
        Claim(
            "On Llama, too, LAMB and MERIT want higher learning rates than AdamW.",
            below("AdamW", "LAMB", "MERIT", of=q.BEST_RATE),
            "table 4, which has GPT-2 alone",
        ),
        columns=e.LOSS_AND_LOGIT,
        charts=(drawing.rates,),
        note=e.INSIDE,
        is_grid=True,
    ),
    Entry(
        "reference",
        "validation loss with large batches against AdamW's with a small one",
        (
            Runs("of references", e.FOUR, by_model=True),
            Runs("references", ("adamw",), series=e.REFERENCE, by_model=True),
        ),
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
        (Runs("first", e.FOUR), Runs("longer", e.FOUR, part="longer")),
        Claim(
            "With several times the tokens, too, MERIT ends below AdamW, LAMB and maxLAMB.",
            below("MERIT", "AdamW", "LAMB", "MaxLAMB", part="longer"),
            "figure 4 and table 3, which have one length for each model",
        ),
        Claim(
            "And its largest logits stay below AdamW's and LAMB's there.",
            below("MERIT", "AdamW", "LAMB", of=e.FIRST, part="longer")
            + below("MERIT", "AdamW", "LAMB", of=e.ALL, part="longer"),
            "figures 2 and 14, which have one length",
        ),
        columns={**e.LOSS, "Largest logit, first layer": e.FIRST, "Mean of all layers": e.ALL},
        charts=(e.losses, e.first_logit),
        note=e.LARGEST,
        is_grid=True,
    ),
    Entry(
        "doubled",
        "validation loss with twice the batch, at separate learning rates",
        (
            Runs("single", e.FIVE, part="single batch"),
            Runs("doubled", e.FIVE, factors=e.GRID, seeds=1, part="twice the batch"),
            Runs("doubled", e.FIVE, part="twice the batch"),
        ),
        Claim(
            "With twice the batch, too, MERIT ends below AdamW, LAMB, maxLAMB and Lion, each at its "
            "middle rate.",
            below("MERIT", "AdamW", "LAMB", "MaxLAMB", "Lion", part="twice the batch", factor=1.0),
            "figure 4 and table 3, which have one batch for each model",
        ),
        Claim(
            "After as many tokens every optimizer ends higher with twice the batch, which is half the steps.",
            same((*LONG, "Lion"), "single batch", "twice the batch", factor=1.0),
            OURS,
        ),
        columns=e.LOSS_AND_LOGIT,
        charts=(losses_over_tokens, drawing.rates),
        note="Only the first seed has the grid. The claims use all seeds, at the rate in its middle.",
    ),
    Entry(
        "variants",
        "MERIT with one ratio for embeddings, ratios by attention head, and smoothed ratios",
        (
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
        ),
        Claim(
            "MERIT ends lower with one ratio for a whole embedding, whose rare rows see few gradients.",
            below("One ratio for embeddings", "MERIT"),
            GUESS,
        ),
        Claim(
            "MERIT ends lower with ratios for each attention head.", below("Ratios by head", "MERIT"), GUESS
        ),
        Claim(
            "MERIT ends lower with ratios from the update's norms of ten steps, not of one.",
            below("Smoothed ratios", "MERIT"),
            GUESS,
        ),
        note=e.MERITS_RATE,
    ),
    Entry(
        "norm",
        "MERIT's element-wise ratios with LAMB's norm, which measures steps of any shape alike",
        (
            Runs("two", ("lamb", "merit")),
            Runs("two", ("merit",), rate_of="lamb", overrides='*:norm="l2"', series=EUCLIDEAN),
            Runs("two", ("merit",), overrides='*:norm="l2"', series=EUCLIDEAN),
        ),
        Claim(
            "With Euclidean norms in its ratios MERIT ends below MERIT.",
            below(EUCLIDEAN, "MERIT", of=q.LOSS_AT_BEST),
            GUESS,
        ),
        Claim(
            "With Euclidean norms in its ratios MERIT ends below LAMB.",
            below(EUCLIDEAN, "LAMB", of=q.LOSS_AT_BEST),
            GUESS,
        ),
        note=(
            "With Euclidean norms MERIT is run at LAMB's learning rate, because its steps go as far, and at "
            "MERIT's; the better one is compared."
        ),
    ),
    Entry(
        "logits",
        "largest attention logit at each size with AdamW, LAMB, maxLAMB, MERIT and Lion",
        (Runs("two", e.FIVE),),
        Claim(
            "At any size MERIT's largest logits stay below LAMB's, each at its best learning rate.",
            below("MERIT", "LAMB", of=e.FIRST) + below("MERIT", "LAMB", of=e.ALL),
            "ours; figures 2 and 14 have one size",
        ),
        columns={"First layer": e.FIRST, "Middle layer": e.MIDDLE, "Mean of all layers": e.ALL},
        charts=(e.first_logit,),
        note=e.LARGEST,
    ),
    Entry(
        "reach",
        "how far a step goes: a step's relative change of the weights against the learning rate",
        (Runs("two", ("lamb", "maxlamb", "merit")),),
        Claim(
            "For their learning rate, steps of MERIT and maxLAMB go further at the beginning than at "
            "the end: while all elements of an update are alike, the largest is a poor measure of it.",
            versus("MERIT", q.REACH["last step"], q.REACH["first step"])
            + versus("MaxLAMB", q.REACH["last step"], q.REACH["first step"]),
            OURS,
        ),
        columns={name.capitalize(): of for name, of in q.REACH.items()},
        charts=(
            drawing.curves(
                "How far a step goes", "relative change / learning rate", q.reach_curve, zero=True
            ),
        ),
    ),
    Entry(
        "warmup",
        "five times the warm-up, at twice and four times the learning rates too",
        (
            Runs("two", e.FOUR, factors=(1.0, 2.0)),
            Runs("two", e.FOUR, factors=(1.0, 2.0, 4.0), warmup=0.1, series="{name}, warm-up 10%"),
        ),
        Claim(
            "With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
            "their learning rate.",
            below(LONG["MERIT"], "MERIT", factor=2.0) + below(LONG["MaxLAMB"], "MaxLAMB", factor=2.0),
            OURS,
        ),
        Claim(
            "And MERIT ends lower than with the short one, each at its best rate.",
            below(LONG["MERIT"], "MERIT", of=q.LOSS_AT_BEST),
            OURS,
        ),
        Claim(
            "With the longer warm-up MERIT ends below AdamW and LAMB that have it too, each at its best "
            "rate.",
            below(LONG["MERIT"], LONG["AdamW"], LONG["LAMB"], of=q.LOSS_AT_BEST),
            OURS,
        ),
        charts=(drawing.rates,),
        is_grid=True,
    ),
    Entry(
        "width",
        "wide or deep: steps against batch for two models of one size",
        (
            Runs("wide", ("adamw", "merit"), by_model=True, part="wide"),
            Runs("deep", ("adamw", "merit"), by_model=True, part="deep"),
        ),
        Claim(
            "With as many parameters, a wide and shallow model can use larger batches than a narrow and "
            "deep one.",
            same(("AdamW", "MERIT"), "deep", "wide", of=q.EFFICIENCY),
            "not the paper's: a hypothesis from work on large batches",
            within="",
        ),
        columns=e.LOSS_AND_STEPS,
        charts=(drawing.steps_against_batch,),
        rows=e.WITH_BATCH,
        note=e.TARGET,
        is_grid=True,
    ),
)

ENTRIES = {entry.name: entry for entry in (*OF_PAPER, *_LATER)}
"""All entries by name, the paper's first."""


def choose(names: Sequence[str]) -> list[Entry]:
    """The entries with these names, in the paper's order; "all" selects every entry."""
    for name in names:
        if name != "all" and name not in ENTRIES:
            hint = did_you_mean(name, ENTRIES, otherwise=";")
            raise ValueError(f"unknown entry {name!r}{hint} there are: all, {', '.join(ENTRIES)}")
    return [entry for name, entry in ENTRIES.items() if name in names or "all" in names]
