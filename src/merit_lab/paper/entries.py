"""The paper's figures and tables, and later questions, as rows: runs, claims, table, charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.paper import drawing, measured, theorem
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, Pair, Side, below, in_order, same, versus
from merit_lab.paper.merit_variant import MERITVariant
from merit_lab.paper.plan import WATCHED, Data, Runs
from merit_lab.paper.scales import Scale
from merit_optim.spelling import did_you_mean

Columns = Mapping[str, q.Quantity]
Numbers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Entry:
    """A figure, a table, or a question."""

    name: str
    title: str
    shows: str
    """What it shows, in a few words."""
    runs: tuple[Runs, ...]
    claims: tuple[Claim, ...]
    columns: Columns
    """Of its table, after those of ``rows``: heads and quantities."""
    charts: tuple[drawing.Draw, ...]
    rows: tuple[str, ...] = ("panel", "series")
    """What its table has a row for."""
    notes: tuple[str, ...] = ()
    paper: Numbers | None = None
    """The paper's numbers that its table shows, by the size of its model and the series."""
    is_grid: bool = False
    """Whether it has many runs, so that it uses the scale's ``grid_seeds``."""
    measure: Callable[[Data, Scale, Path | None], None] | None = None
    """Measure what is missing after training; the last argument is the folder of evaluation sets."""
    made_up: Callable[[], Data] | None = None
    """Rows that need no training."""

    def num_seeds(self, scale: Scale, seeds: int | None) -> int:
        """The number of seeds: ``seeds``, or the scale's default if that is None."""
        return seeds or (scale.grid_seeds if self.is_grid else scale.seeds)


THREE = ("AdamW", "LAMB", "MERIT")
FOUR = ("adamw", "lamb", "maxlamb", "merit")
FIVE = (*FOUR, "lion")
GRID = (0.5, 1.0, 2.0)
VARIANT = f"{MERITVariant.__module__}:{MERITVariant.__name__}"
WITHOUT = "MERIT without clip", "MERIT without weight-wise bound", "MERIT without element-wise ratio"
LONG = {name: f"{name}, warm-up 10%" for name in ("AdamW", "LAMB", "MaxLAMB", "MERIT")}
EUCLIDEAN, NORMED, REFERENCE = "MERIT, Euclidean norms", "AdamW with QK-Norm", "AdamW, small batch"

GPT2 = {
    "small": {"AdamW": 3.470, "LAMB": 3.355, "MaxLAMB": 3.304, "MERIT": 3.280},
    "medium": {"AdamW": 3.172, "LAMB": 3.068, "MaxLAMB": 3.040, "MERIT": 2.982},
    "large": {"AdamW": 3.039, "LAMB": 2.971, "MERIT": 2.897},
}
LLAMA = {
    "130M": {"AdamW": 3.277, "LAMB": 3.265, "MERIT": 3.199},
    "350M": {"AdamW": 3.014, "LAMB": 3.001, "MERIT": 2.957},
}
SECONDS = {
    "medium": {"AdamW": 57.69, "LAMB": 57.93, "MERIT": 58.50},
    "large": {"AdamW": 242.50, "LAMB": 243.51, "MERIT": 245.46},
}
ACCURACY = {"small": {REFERENCE: 43.56, "MERIT": 43.87}, "medium": {REFERENCE: 46.59, "MERIT": 46.70}}

WITH_RATE, WITH_BATCH = ("panel", "series", "lr"), ("panel", "series", "batch")
LOSS = {"Validation loss": q.LOSS}
LOSS_AND_LOGIT = {**LOSS, "Largest logit": q.LARGEST_LOGIT}
LOSS_AND_STEPS = {**LOSS, "Steps to the target": q.STEPS}
FIRST, MIDDLE, ALL = (
    q.logit(*one) for one in (("first layer", q.first), ("middle layer", q.middle), ("all layers", q.every))
)
SHALLOW, MIDDLE_THIRD, DEEP = (
    q.logit(*one)
    for one in (("shallow layers", q.shallow), ("middle layers", q.middle_third), ("deep layers", q.deep))
)
CLIPPED = {name: q.clipped(name, layer) for name, layer in q.CLIPPED_LAYERS.items()}

losses = drawing.curves("Validation loss", drawing.LOSS, q.losses)
losses_over_tokens = drawing.curves("Validation loss", drawing.LOSS, q.losses, against="tokens")
first_logit, middle_logit = (
    drawing.curves(
        f"Largest logit, {name} layer", "largest attention logit", q.logit_curve(layers), wide=True
    )
    for name, layers in (("first", q.first), ("middle", q.middle))
)

GUESS, OURS, BEYOND = "a guess of ours", "ours, not the paper's", "beyond the paper: "
MERITS_RATE = "All variants have MERIT's learning rate."
MORE = "Holds is more than the claim: MERIT is better. Does not hold: it is worse."
LARGEST = (
    "Compared is the largest logit that a layer had at any step, over several layers the mean of theirs. A "
    "run that diverged counts as worse than any other, whatever its logits were."
)
INSIDE = (
    "A seed's best rate counts only if it lies inside the grid, with a worse one on each side: each "
    "optimizer has a separate grid, so a best rate on the edge depends on where the grid was placed. The "
    "other entries use the rate in the middle of each grid."
)
TARGET = (
    "The target is the lowest validation loss that every run ended at or below, without those that "
    "diverged. Each model has its own. All runs have the same number of tokens; learning rates scale with "
    "the square root of the batch."
)


def _scores(entry: str) -> Columns:
    return {name: q.score(name) for name in PAPER_SETS[entry]}


_ALL = (
    Entry(
        "fig1",
        "Figure 1: steps against batch",
        "steps to a validation loss against the batch size, with the line of ideal scaling",
        (Runs("batches", WATCHED, by_model=True),),
        (
            Claim(
                "At the largest batch MERIT needs the fewest steps to a given loss.",
                "figure 1",
                below("MERIT", "AdamW", "LAMB", of=q.STEPS_AT_LARGEST),
            ),
            Claim(
                "With growing batches MERIT stays nearer to ideal scaling than AdamW and LAMB.",
                "figure 1 and section 5.2",
                below("AdamW", "MERIT", of=q.EFFICIENCY) + below("LAMB", "MERIT", of=q.EFFICIENCY),
            ),
        ),
        LOSS_AND_STEPS,
        (drawing.steps_against_batch,),
        rows=WITH_BATCH,
        notes=(TARGET,),
        is_grid=True,
    ),
    Entry(
        "fig2",
        "Figure 2: the largest attention logit",
        "largest attention logit over training, first and middle layer, large batch",
        (Runs("observed", WATCHED),),
        (
            Claim(
                "AdamW's largest logit grows far beyond LAMB's and MERIT's in the first layer; in the "
                "middle layer only MERIT keeps it down.",
                "figure 2",
                below("LAMB", "AdamW", of=FIRST)
                + below("MERIT", "AdamW", of=FIRST)
                + below("MERIT", "LAMB", of=MIDDLE),
            ),
        ),
        {"First layer": FIRST, "Middle layer": MIDDLE},
        (first_logit, middle_logit),
        notes=(LARGEST,),
    ),
    Entry(
        "fig3",
        "Figure 3: query and key weights",
        "magnitudes of query and key weights, and how alike rows and columns are",
        (Runs("first", WATCHED),),
        (
            Claim(
                "Magnitudes of query and key weights are alike within rows and within columns.",
                "figure 3",
                tuple(versus(one, q.constant(1), of) for one in THREE for of in measured.ALIKE.values()),
            ),
        ),
        measured.ALIKE,
        (drawing.weights,),
        notes=(
            (
                "The score is the variance of the row (column) means as a share of the variance of all "
                "magnitudes, divided by the share that randomly ordered elements would have. 1 means no "
                "structure."
            ),
        ),
        measure=measured.need_weights,
    ),
    Entry(
        "fig4",
        "Figure 4: validation loss on GPT-2",
        "validation loss with AdamW, LAMB, Lion, Sophia-G and MERIT, large batches",
        (Runs("gpt2", (*WATCHED, "lion", "sophiag")),),
        (
            Claim(
                "With large batches MERIT ends at a lower validation loss than AdamW, LAMB, Lion and "
                "Sophia-G.",
                "figure 4",
                below("MERIT", "AdamW", "LAMB", "Lion", "SophiaG"),
                paper=GPT2,
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        paper=GPT2,
    ),
    Entry(
        "fig5",
        "Figure 5: zero-shot perplexity",
        "zero-shot perplexity on LAMBADA and WikiText",
        (Runs("gpt2", WATCHED),),
        (
            Claim(
                "On LAMBADA and WikiText MERIT's models have a lower perplexity than AdamW's and LAMB's.",
                "figure 5",
                below("MERIT", "AdamW", "LAMB", of=q.log_perplexity("lambada"))
                + below("MERIT", "AdamW", "LAMB", of=q.log_perplexity("wikitext")),
            ),
        ),
        _scores("fig5"),
        tuple(drawing.points(f"perplexity on {name}", of) for name, of in _scores("fig5").items()),
        measure=measured.evaluate_on("fig5"),
    ),
    Entry(
        "fig6",
        "Figure 6: validation loss on Llama",
        "validation loss with AdamW, LAMB and MERIT on Llama",
        (Runs("llama", WATCHED),),
        (
            Claim(
                "On Llama, too, MERIT ends below AdamW and LAMB.",
                "figure 6",
                below("MERIT", "AdamW", "LAMB"),
                paper=LLAMA,
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        paper=LLAMA,
        notes=("The paper trains Llama on C4 and gives no learning rates; these are GPT-2's at that size.",),
    ),
    Entry(
        "fig7",
        "Figure 7: curvature at the end",
        "Hessian at the end point: top eigenvalue, trace, spectral density",
        (Runs("first", ("adamw", "merit")),),
        (
            Claim(
                "MERIT ends in a flatter place than AdamW: a smaller top eigenvalue and a smaller trace of "
                "the Hessian.",
                "figure 7",
                below("MERIT", "AdamW", of=measured.TOP_EIGENVALUE, paper="12.326 against 37.231")
                + below("MERIT", "AdamW", of=measured.TRACE, paper="3444.92 against 12994.91"),
            ),
        ),
        {"Top eigenvalue": measured.TOP_EIGENVALUE, "Trace": measured.TRACE},
        (drawing.density,),
        notes=("Over training sequences; the paper does not name its data, so magnitudes need not agree.",),
        measure=measured.measure_curvature_of,
    ),
    Entry(
        "fig8",
        "Figure 8: QK-Norm against MERIT",
        "AdamW with and without QK-Norm at several learning rates, and MERIT",
        (
            Runs("first", ("merit",)),
            Runs("first", ("adamw",), factors=(*GRID, 4.0)),
            Runs("first", ("adamw",), factors=(*GRID, 4.0), qk_norm=True, series=NORMED),
        ),
        (
            Claim(
                "QK-Norm lets AdamW use higher learning rates.",
                "figure 8",
                below(NORMED, "AdamW", factor=4.0),
            ),
            Claim(
                "With large batches QK-Norm costs quality: it ends above AdamW without it, and above MERIT.",
                "figure 8 and section 5.3",
                below("AdamW", NORMED, of=q.LOSS_AT_BEST) + below("MERIT", NORMED, of=q.LOSS_AT_BEST),
            ),
        ),
        LOSS,
        (drawing.rates,),
        rows=WITH_RATE,
        notes=("QK-Norm here is RMSNorm with a learned scale on each head's queries and keys.",),
        is_grid=True,
    ),
    Entry(
        "fig9",
        "Figure 9: parts of MERIT left out",
        "MERIT without clip, without weight-wise bound, without element-wise ratio",
        (
            Runs("first", WATCHED),
            Runs("first", ("merit",), without=("clip",), series=WITHOUT[0]),
            Runs("first", ("merit",), without=("weight-bound",), series=WITHOUT[1]),
            Runs("first", ("merit",), without=("element-wise",), series=WITHOUT[2]),
        ),
        (
            Claim(
                "MERIT ends higher without its clip, without the weight-wise bound, and without the "
                "element-wise ratio.",
                "figure 9",
                below("MERIT", *WITHOUT),
            ),
            Claim(
                "Without its clip MERIT still ends below AdamW and LAMB.",
                "section 5.4, ablation 1",
                below(WITHOUT[0], "AdamW", "LAMB"),
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        notes=(MERITS_RATE,),
    ),
    Entry(
        "fig10",
        "Figure 10: l2 norm and max norm",
        "relative gap between l2 and max norm of query and key weights during training",
        (Runs("observed", WATCHED),),
        (
            Claim(
                "The largest query and key weights are a small part of the l2 norm: of 1024 x 1024 weights "
                f"the gap is 0.99 to 0.996, so that the largest is {measured.PAPER_PEAKS[0]:.2f} to "
                f"{measured.PAPER_PEAKS[1]:.2f} times what normal numbers would have.",
                "figure 10",
                tuple(versus(one, q.constant(measured.PAPER_PEAKS[0]), measured.PEAK) for one in THREE)
                + tuple(versus(one, measured.PEAK, q.constant(measured.PAPER_PEAKS[1])) for one in THREE),
            ),
        ),
        {"Gap (the paper's: 0.99 to 0.996)": measured.GAP, "Largest, times normal": measured.PEAK},
        (drawing.curves("Gap between l2 and max norm", "(l2 - max) / l2", measured.GAP_CURVES, by="series"),),
        notes=(
            (
                "The gap depends on the size of the matrix, so the comparison divides the largest element "
                "by that of as many independent normal numbers; means over first and middle layer, weights "
                "and checkpoints."
            ),
        ),
        measure=measured.need_weights,
    ),
    Entry(
        "fig11",
        "Figure 11: the largest attention logit with a small batch",
        "largest attention logit over training, small batch against large",
        (
            Runs("observed, small batch", WATCHED, part="small batch"),
            Runs("observed", WATCHED, part="large batch"),
        ),
        (
            Claim(
                "With a small batch the largest logits are well below those with a large batch.",
                "figure 11",
                same(THREE, "small batch", "large batch", of=FIRST)
                + same(THREE, "small batch", "large batch", of=MIDDLE),
            ),
        ),
        {"First layer": FIRST, "Middle layer": MIDDLE},
        (first_logit, middle_logit),
        notes=(
            LARGEST,
            "Learning rates of the small batch are the large one's, scaled by the square root of the batch.",
        ),
        is_grid=True,
    ),
    Entry(
        "fig12",
        "Figure 12: zero-shot accuracy on SuperGLUE",
        "zero-shot accuracy on SuperGLUE tasks with AdamW, LAMB and MERIT",
        (Runs("gpt2", WATCHED),),
        (
            Claim(
                "On most SuperGLUE tasks MERIT's model is more accurate than AdamW's and LAMB's.",
                "figure 12",
                tuple(versus("", q.constant(0), q.wins("fig12", rival)) for rival in ("AdamW", "LAMB")),
            ),
        ),
        {**_scores("fig12"), "average": q.average("fig12")},
        (drawing.points("average accuracy (%)", q.average("fig12")),),
        measure=measured.evaluate_on("fig12"),
    ),
    Entry(
        "fig13",
        "Figure 13: clipped elements",
        "share of clipped elements, first, middle and last layer",
        (Runs("first", ("merit",)),),
        (
            Claim(
                "The clip acts in the middle layers; in the first and the last layer it hardly ever does.",
                "figure 13",
                (
                    versus("MERIT", CLIPPED["first layer"], CLIPPED["middle layer"], "near 0 against 12%"),
                    versus("MERIT", CLIPPED["last layer"], CLIPPED["middle layer"], "0.25% against 12%"),
                ),
            ),
        ),
        {f"{name.capitalize()}, highest %": of for name, of in CLIPPED.items()},
        (drawing.curves("Share of clipped elements", "share of elements", q.CLIPPED_CURVES, zero=True),),
    ),
    Entry(
        "fig14",
        "Figure 14: the largest attention logit of every layer",
        "largest attention logit over training, all layers",
        (Runs("observed", WATCHED),),
        (
            Claim(
                "In shallow layers LAMB and MERIT both stay below AdamW; in the middle layers MERIT stays "
                "below LAMB.",
                "figure 14",
                below("LAMB", "AdamW", of=SHALLOW)
                + below("MERIT", "AdamW", of=SHALLOW)
                + below("MERIT", "LAMB", of=MIDDLE_THIRD),
            ),
        ),
        {"Shallow layers": SHALLOW, "Middle layers": MIDDLE_THIRD, "Deep layers": DEEP},
        (drawing.layers,),
        notes=(LARGEST,),
    ),
    Entry(
        "fig15",
        "Figure 15: the weight-wise bound",
        "share of elements where the weight-wise bound decided",
        (Runs("observed", ("merit",)),),
        (
            Claim(
                "The weight-wise bound decides for more elements late in training than early.",
                "figure 15",
                (versus("MERIT", q.bounded(last=False), q.bounded(last=True)),),
            ),
        ),
        {"First third, %": q.bounded(last=False), "Last third, %": q.bounded(last=True)},
        (
            drawing.curves(
                "Where the weight-wise bound decided", "share of elements", q.bounded_curve, zero=True
            ),
        ),
    ),
    Entry(
        "table1",
        "Table 1: a large batch with MERIT against a small one with AdamW",
        "zero-shot accuracy on ARC, COPA, HellaSwag, RACE and WiC, large batch against small",
        (
            Runs("long, small batch", ("adamw",), series=REFERENCE, by_model=True),
            Runs("long, large batch", ("merit",), by_model=True),
        ),
        (
            Claim(
                "MERIT with a large batch is as accurate on average as AdamW with a small one, or more.",
                "table 1",
                below(REFERENCE, "MERIT", of=q.average("table1")),
                paper=ACCURACY,
            ),
        ),
        {**_scores("table1"), "average": q.average("table1")},
        (drawing.points("average accuracy (%)", q.average("table1")),),
        rows=WITH_BATCH,
        notes=(MORE,),
        is_grid=True,
        measure=measured.evaluate_on("table1"),
    ),
    Entry(
        "table2",
        "Table 2: time of a step",
        "time of a step and TFLOP/s with AdamW, LAMB and MERIT",
        (Runs("last two", WATCHED),),
        (
            Claim(
                "MERIT's step takes about 1% longer than LAMB's and AdamW's: at most the larger difference "
                "of the paper's two sizes.",
                "table 2",
                (
                    Pair(Side(q.SECONDS, "MERIT"), Side(q.SECONDS, "AdamW", times=1.014)),
                    Pair(Side(q.SECONDS, "MERIT"), Side(q.SECONDS, "LAMB", times=1.010)),
                ),
                paper=SECONDS,
            ),
        ),
        {"Seconds": q.SECONDS, "TFLOP/s": q.TERAFLOPS, "Optimizer's share, %": q.OPTIMIZER_SHARE},
        (drawing.points("seconds for a step", q.SECONDS),),
        paper=SECONDS,
        notes=(
            (
                "An optimizer's share of a step falls as the batch grows. With few tokens in a step, as on "
                "a CPU, it is far larger than in the paper. `merit bench` times the optimizers alone."
            ),
        ),
    ),
    Entry(
        "table3",
        "Table 3: the choice of norm",
        "validation loss with AdamW, LAMB, maxLAMB and MERIT",
        (Runs("two", FOUR),),
        (
            Claim(
                "The max norm alone (maxLAMB) gains a little over LAMB, MERIT's other parts the rest.",
                "table 3",
                in_order("MERIT", "MaxLAMB", "LAMB", "AdamW"),
                paper=GPT2,
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        paper=GPT2,
        notes=("The paper gives no learning rate for maxLAMB.",),
    ),
    Entry(
        "table4",
        "Table 4: learning rates",
        "grids of learning rates, per optimizer and size",
        (Runs("gpt2", (*FIVE, "sophiag"), factors=GRID),),
        (
            Claim(
                "LAMB and MERIT want higher learning rates than AdamW (they are relative to the weights), "
                "Lion a lower one.",
                "table 4",
                below("AdamW", "LAMB", "MERIT", of=q.BEST_RATE) + below("Lion", "AdamW", of=q.BEST_RATE),
            ),
        ),
        LOSS_AND_LOGIT,
        (drawing.rates,),
        rows=WITH_RATE,
        notes=(INSIDE,),
        is_grid=True,
    ),
    Entry(
        "theorem1",
        "Theorem 1: convergence of MERIT-W",
        "gradient norm of MERIT-W on a smooth problem under the paper's bound, and its rate",
        (),
        (
            Claim(
                "With as many samples in a batch as there are steps, MERIT-W's mean squared gradient norm "
                "stays under the theorem's bound.",
                "theorem 1, beta2 > 0, with the constants of its proof",
                (versus("", theorem.MEASURED, theorem.BOUND),),
                within="panel",
            ),
            Claim(
                "It falls with the number of steps T at least as fast as the bound, as 1 / sqrt(T).",
                "theorem 1",
                (versus("", theorem.EXPONENT, q.constant(-0.5)),),
                within="",
            ),
        ),
        {
            "Mean squared gradient norm": q.values_of("measured", "mean squared gradient norm"),
            "Bound": q.values_of("bound", "bound"),
        },
        (drawing.theorem,),
        rows=("panel",),
        notes=(theorem.ABOUT,),
        made_up=theorem.data,
    ),
    Entry(
        "llama-rates",
        "Learning rates on Llama",
        f"{BEYOND}grids around the learning rates of figure 6, which the paper does not give",
        (Runs("llama", WATCHED, factors=GRID),),
        (
            Claim(
                "On Llama, too, LAMB and MERIT want higher learning rates than AdamW.",
                "table 4, which has GPT-2 alone",
                below("AdamW", "LAMB", "MERIT", of=q.BEST_RATE),
            ),
        ),
        LOSS_AND_LOGIT,
        (drawing.rates,),
        rows=WITH_RATE,
        notes=(INSIDE,),
        is_grid=True,
    ),
    Entry(
        "reference",
        "Large batches against a small one",
        f"{BEYOND}validation loss with large batches against AdamW's with a small one",
        (
            Runs("of references", FOUR, by_model=True),
            Runs("references", ("adamw",), series=REFERENCE, by_model=True),
        ),
        (
            Claim(
                "With a large batch MERIT ends no higher than AdamW with a small one, after as many tokens.",
                "abstract and table 1, which say so of accuracies",
                below("MERIT", REFERENCE),
            ),
        ),
        LOSS,
        (losses_over_tokens,),
        rows=("panel", "series", "batch", "lr"),
        notes=(MORE,),
    ),
    Entry(
        "horizon",
        "Longer training",
        f"{BEYOND}loss and logits of AdamW, LAMB, maxLAMB and MERIT after more tokens",
        (Runs("first", FOUR), Runs("longer", FOUR, part="longer")),
        (
            Claim(
                "With several times the tokens, too, MERIT ends below AdamW, LAMB and maxLAMB.",
                "figure 4 and table 3, which have one length for each model",
                below("MERIT", "AdamW", "LAMB", "MaxLAMB", part="longer"),
            ),
            Claim(
                "And its largest logits stay below AdamW's and LAMB's there.",
                "figures 2 and 14, which have one length",
                below("MERIT", "AdamW", "LAMB", of=FIRST, part="longer")
                + below("MERIT", "AdamW", "LAMB", of=ALL, part="longer"),
            ),
        ),
        {**LOSS, "Largest logit, first layer": FIRST, "Mean of all layers": ALL},
        (losses, first_logit),
        rows=WITH_RATE,
        notes=(LARGEST,),
        is_grid=True,
    ),
    Entry(
        "doubled",
        "Twice the batch",
        f"{BEYOND}validation loss of AdamW, LAMB, maxLAMB, MERIT and Lion with twice the batch, at separate "
        "learning rates",
        (
            Runs("single", FIVE, part="single batch"),
            Runs("doubled", FIVE, factors=GRID, seeds=1, part="twice the batch"),
            Runs("doubled", FIVE, part="twice the batch"),
        ),
        (
            Claim(
                "With twice the batch, too, MERIT ends below AdamW, LAMB, maxLAMB and Lion, each at its "
                "middle rate.",
                "figure 4 and table 3, which have one batch for each model",
                below("MERIT", "AdamW", "LAMB", "MaxLAMB", "Lion", part="twice the batch", factor=1.0),
            ),
            Claim(
                "After as many tokens every optimizer ends higher with twice the batch, which is half the "
                "steps.",
                OURS,
                same(
                    ("AdamW", "LAMB", "MaxLAMB", "MERIT", "Lion"),
                    "single batch",
                    "twice the batch",
                    factor=1.0,
                ),
            ),
        ),
        LOSS_AND_LOGIT,
        (losses_over_tokens, drawing.rates),
        rows=WITH_RATE,
        notes=("Only the first seed has the grid. The claims use all seeds, at the rate in its middle.",),
    ),
    Entry(
        "variants",
        "Variants of MERIT",
        f"{BEYOND}MERIT with one ratio for embeddings, ratios by attention head, and smoothed ratios",
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
        (
            Claim(
                "MERIT ends lower with one ratio for a whole embedding, whose rare rows see few gradients.",
                GUESS,
                below("One ratio for embeddings", "MERIT"),
            ),
            Claim(
                "MERIT ends lower with ratios for each attention head.",
                GUESS,
                below("Ratios by head", "MERIT"),
            ),
            Claim(
                "MERIT ends lower with ratios from the update's norms of ten steps, not of one.",
                GUESS,
                below("Smoothed ratios", "MERIT"),
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        notes=(MERITS_RATE,),
    ),
    Entry(
        "norm",
        "MERIT with Euclidean norms",
        f"{BEYOND}MERIT's element-wise ratios with LAMB's norm, which measures steps of any shape alike",
        (
            Runs("two", ("lamb", "merit")),
            Runs("two", ("merit",), rate_of="lamb", overrides='*:norm="l2"', series=EUCLIDEAN),
            Runs("two", ("merit",), overrides='*:norm="l2"', series=EUCLIDEAN),
        ),
        (
            Claim(
                "With Euclidean norms in its ratios MERIT ends below MERIT.",
                GUESS,
                below(EUCLIDEAN, "MERIT", of=q.LOSS_AT_BEST),
            ),
            Claim(
                "With Euclidean norms in its ratios MERIT ends below LAMB.",
                GUESS,
                below(EUCLIDEAN, "LAMB", of=q.LOSS_AT_BEST),
            ),
        ),
        LOSS,
        (losses,),
        rows=WITH_RATE,
        notes=(
            (
                "With Euclidean norms MERIT is run at LAMB's learning rate, because its steps go as far, "
                "and at MERIT's; the better one is compared."
            ),
        ),
    ),
    Entry(
        "logits",
        "Largest logits at each size",
        f"{BEYOND}largest attention logit with AdamW, LAMB, maxLAMB, MERIT and Lion",
        (Runs("two", FIVE),),
        (
            Claim(
                "At any size MERIT's largest logits stay below LAMB's, each at its best learning rate.",
                "ours; figures 2 and 14 have one size",
                below("MERIT", "LAMB", of=FIRST) + below("MERIT", "LAMB", of=ALL),
            ),
        ),
        {"First layer": FIRST, "Middle layer": MIDDLE, "Mean of all layers": ALL},
        (first_logit,),
        notes=(LARGEST,),
    ),
    Entry(
        "reach",
        "How far a step goes",
        f"{BEYOND}a step's relative change of the weights against the learning rate",
        (Runs("two", ("lamb", "maxlamb", "merit")),),
        (
            Claim(
                "For their learning rate, steps of MERIT and maxLAMB go further at the beginning than at "
                "the end: while all elements of an update are alike, the largest is a poor measure of it.",
                OURS,
                tuple(versus(one, q.reach(last=True), q.reach(last=False)) for one in ("MERIT", "MaxLAMB")),
            ),
        ),
        {"First step": q.reach(last=False), "Last step": q.reach(last=True)},
        (drawing.curves("How far a step goes", "relative change / learning rate", q.reach_curve, zero=True),),
    ),
    Entry(
        "warmup",
        "A longer warm-up",
        f"{BEYOND}AdamW, LAMB, maxLAMB and MERIT with five times the warm-up, at twice and four times their "
        "rates too",
        (
            Runs("two", FOUR, factors=(1.0, 2.0)),
            Runs("two", FOUR, factors=(1.0, 2.0, 4.0), warmup=0.1, series="{name}, warm-up 10%"),
        ),
        (
            Claim(
                "With a longer warm-up MERIT and maxLAMB, whose first steps go furthest, lose less at twice "
                "their learning rate.",
                OURS,
                below(LONG["MERIT"], "MERIT", factor=2.0) + below(LONG["MaxLAMB"], "MaxLAMB", factor=2.0),
            ),
            Claim(
                "And MERIT ends lower than with the short one, each at its best rate.",
                OURS,
                below(LONG["MERIT"], "MERIT", of=q.LOSS_AT_BEST),
            ),
            Claim(
                "With the longer warm-up MERIT ends below AdamW and LAMB that have it too, each at its best "
                "rate.",
                OURS,
                below(LONG["MERIT"], LONG["AdamW"], LONG["LAMB"], of=q.LOSS_AT_BEST),
            ),
        ),
        LOSS,
        (drawing.rates,),
        rows=WITH_RATE,
        is_grid=True,
    ),
    Entry(
        "width",
        "Wide or deep: how far the batch can grow",
        f"{BEYOND}steps against batch for a wide and a deep model of one size",
        (
            Runs("wide", ("adamw", "merit"), by_model=True, part="wide"),
            Runs("deep", ("adamw", "merit"), by_model=True, part="deep"),
        ),
        (
            Claim(
                "With as many parameters, a wide and shallow model can use larger batches than a narrow and "
                "deep one.",
                "not the paper's: a hypothesis from work on large batches",
                same(("AdamW", "MERIT"), "deep", "wide", of=q.EFFICIENCY),
                within="",
            ),
        ),
        LOSS_AND_STEPS,
        (drawing.steps_against_batch,),
        rows=WITH_BATCH,
        notes=(TARGET,),
        is_grid=True,
    ),
)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ALL}
"""All entries by name, in the paper's order."""


def choose(names: Sequence[str]) -> list[Entry]:
    """The entries with these names, in the paper's order; "all" selects every entry."""
    for name in names:
        if name != "all" and name not in ENTRIES:
            hint = did_you_mean(name, ENTRIES, otherwise=";")
            raise ValueError(f"unknown entry {name!r}{hint} there are: all, {', '.join(ENTRIES)}")
    return [entry for name, entry in ENTRIES.items() if name in names or "all" in names]
