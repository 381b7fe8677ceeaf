"""The figures and tables of the paper as rows: runs, claims, columns of the table, charts."""

from __future__ import annotations

from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.paper import drawing, measured, theorem
from merit_lab.paper import entry as e
from merit_lab.paper import quantities as q
from merit_lab.paper.checks import Claim, Pair, Side, below, same, versus
from merit_lab.paper.entry import Entry
from merit_lab.paper.plan import WATCHED, Runs

NORMED = "AdamW with QK-Norm"
WITHOUT = "MERIT without clip", "MERIT without weight-wise bound", "MERIT without element-wise ratio"

# The paper's numbers.
GPT2 = {
    "GPT-2 small": {"AdamW": 3.470, "LAMB": 3.355, "MaxLAMB": 3.304, "MERIT": 3.280},
    "GPT-2 medium": {"AdamW": 3.172, "LAMB": 3.068, "MaxLAMB": 3.040, "MERIT": 2.982},
    "GPT-2 large": {"AdamW": 3.039, "LAMB": 2.971, "MERIT": 2.897},
}
LLAMA = {
    "Llama 130M": {"AdamW": 3.277, "LAMB": 3.265, "MERIT": 3.199},
    "Llama 350M": {"AdamW": 3.014, "LAMB": 3.001, "MERIT": 2.957},
}
SECONDS = {
    "GPT-2 medium": {"AdamW": 57.69, "LAMB": 57.93, "MERIT": 58.50},
    "GPT-2 large": {"AdamW": 242.50, "LAMB": 243.51, "MERIT": 245.46},
}
ACCURACY = {
    "GPT-2 small": {e.REFERENCE: 43.56, "MERIT": 43.87},
    "GPT-2 medium": {e.REFERENCE: 46.59, "MERIT": 46.70},
}


def _scores(entry: str) -> tuple[q.Quantity, ...]:
    return tuple(map(measured.score, PAPER_SETS[entry]))


OF_PAPER = (
    Entry(
        "fig1",
        "steps to a validation loss against the batch size",
        Runs("batches", WATCHED),
        Claim(
            "At the largest batch MERIT needs the fewest steps to a given loss.",
            below("MERIT", "AdamW", "LAMB", of=q.STEPS_AT_LARGEST),
        ),
        Claim(
            "With growing batches MERIT stays nearer to ideal scaling than AdamW and LAMB.",
            below("AdamW", "MERIT", of=q.EFFICIENCY) + below("LAMB", "MERIT", of=q.EFFICIENCY),
            "figure 1 and section 5.2",
        ),
        columns=(q.LOSS, q.STEPS),
        charts=(drawing.steps_against_batch,),
        rows=e.WITH_BATCH,
        note=e.TARGET,
        is_grid=True,
    ),
    Entry(
        "fig2",
        "largest attention logit, first and middle layer, large batch",
        Runs("observed", WATCHED),
        Claim(
            "AdamW's largest logit grows far beyond LAMB's and MERIT's in the first layer; in the "
            "middle layer only MERIT keeps it down.",
            below("LAMB", "AdamW", of=q.FIRST)
            + below("MERIT", "AdamW", of=q.FIRST)
            + below("MERIT", "LAMB", of=q.MIDDLE),
        ),
        columns=(q.FIRST, q.MIDDLE),
        charts=(e.first_logit, e.middle_logit),
        note=e.LARGEST,
    ),
    Entry(
        "fig3",
        "query and key weights: magnitudes, and how alike rows and columns are",
        Runs("first", WATCHED),
        Claim(
            "Magnitudes of query and key weights are alike within rows and within columns.",
            sum((versus(one, q.constant(1), of) for one in e.THREE for of in measured.ALIKE), ()),
        ),
        columns=tuple(measured.ALIKE),
        charts=(drawing.weights,),
        note=(
            "The score is the variance of the row (column) means as a share of the variance of all "
            "magnitudes, divided by the share that elements in random order would have. 1 is no structure."
        ),
        measure=measured.need_weights,
    ),
    Entry(
        "fig4",
        "validation loss on GPT-2 with AdamW, LAMB, Lion, Sophia-G and MERIT",
        Runs("gpt2", (*WATCHED, "lion", "sophiag")),
        Claim(
            "With large batches MERIT ends at a lower validation loss than AdamW, LAMB, Lion and Sophia-G.",
            below("MERIT", "AdamW", "LAMB", "Lion", "SophiaG"),
        ),
        paper=GPT2,
    ),
    Entry(
        "fig5",
        "zero-shot perplexity on LAMBADA and WikiText",
        Runs("gpt2", WATCHED),
        Claim(
            "On LAMBADA and WikiText MERIT's models have a lower perplexity than AdamW's and LAMB's.",
            below("MERIT", "AdamW", "LAMB", of=measured.log_perplexity("lambada"))
            + below("MERIT", "AdamW", "LAMB", of=measured.log_perplexity("wikitext")),
        ),
        columns=_scores("fig5"),
        charts=tuple(drawing.points(f"perplexity on {of.name}", of) for of in _scores("fig5")),
        measure=measured.evaluate_on("fig5"),
    ),
    Entry(
        "fig6",
        "validation loss on Llama with AdamW, LAMB and MERIT",
        Runs("llama", WATCHED),
        Claim("On Llama, too, MERIT ends below AdamW and LAMB.", below("MERIT", "AdamW", "LAMB")),
        note="The paper trains Llama on C4 and gives no learning rates; these are GPT-2's at that size.",
        paper=LLAMA,
    ),
    Entry(
        "fig7",
        "curvature at the end: top eigenvalue, trace and spectral density of the Hessian",
        Runs("first", ("adamw", "merit")),
        Claim(
            "MERIT ends in a flatter place than AdamW: a smaller top eigenvalue and a smaller trace of "
            "the Hessian.",
            below("MERIT", "AdamW", of=measured.TOP_EIGENVALUE, paper="12.326 against 37.231")
            + below("MERIT", "AdamW", of=measured.TRACE, paper="3444.92 against 12994.91"),
        ),
        columns=(measured.TOP_EIGENVALUE, measured.TRACE),
        charts=(drawing.density,),
        note="Over training sequences; the paper does not name its data, so magnitudes need not agree.",
        measure=measured.measure_curvature_of,
    ),
    Entry(
        "fig8",
        "AdamW with and without QK-Norm at several learning rates, and MERIT",
        Runs("first", ("merit",)),
        Runs("first", ("adamw",), factors=(*e.GRID, 4.0)),
        Runs("first", ("adamw",), factors=(*e.GRID, 4.0), changes={"model.qk_norm": True}, series=NORMED),
        Claim("QK-Norm lets AdamW use higher learning rates.", below(NORMED, "AdamW", factor=4.0)),
        Claim(
            "With large batches QK-Norm costs quality: it ends above AdamW without it, and above MERIT.",
            below("AdamW", NORMED, of=q.LOSS_AT_BEST) + below("MERIT", NORMED, of=q.LOSS_AT_BEST),
            "figure 8 and section 5.3",
        ),
        charts=(drawing.rates,),
        note="QK-Norm here is RMSNorm with a learned scale on each head's queries and keys.",
        is_grid=True,
    ),
    Entry(
        "fig9",
        "MERIT without clip, without weight-wise bound, without element-wise ratio",
        Runs("first", WATCHED),
        Runs("first", ("merit",), changes={"optimizer.without": ("clip",)}, series=WITHOUT[0]),
        Runs("first", ("merit",), changes={"optimizer.without": ("weight-bound",)}, series=WITHOUT[1]),
        Runs("first", ("merit",), changes={"optimizer.without": ("element-wise",)}, series=WITHOUT[2]),
        Claim(
            "MERIT ends higher without its clip, without the weight-wise bound, and without the "
            "element-wise ratio.",
            below("MERIT", *WITHOUT),
        ),
        Claim(
            "Without its clip MERIT still ends below AdamW and LAMB.",
            below(WITHOUT[0], "AdamW", "LAMB"),
            "section 5.4, ablation 1",
        ),
        note=e.MERITS_RATE,
    ),
    Entry(
        "fig10",
        "relative gap between l2 and max norm of query and key weights",
        Runs("observed", WATCHED),
        Claim(
            "The largest query and key weights are a small part of the l2 norm: of 1024 x 1024 weights "
            f"the gap is 0.99 to 0.996, so that the largest is {measured.PAPER_PEAKS[0]:.2f} to "
            f"{measured.PAPER_PEAKS[1]:.2f} times what normal numbers would have.",
            sum(
                (
                    versus(one, q.constant(measured.PAPER_PEAKS[0]), measured.PEAK)
                    + versus(one, measured.PEAK, q.constant(measured.PAPER_PEAKS[1]))
                    for one in e.THREE
                ),
                (),
            ),
        ),
        columns=(measured.GAP, measured.PEAK),
        charts=(
            drawing.curves("Gap between l2 and max norm", "(l2 - max) / l2", measured.gaps, by="series"),
        ),
        note=(
            "The gap depends on the size of the matrix, so the comparison divides the largest element by "
            "that of as many independent normal numbers; means over first and middle layer, weights and "
            "checkpoints."
        ),
        measure=measured.need_weights,
    ),
    Entry(
        "fig11",
        "largest attention logit, small batch against large",
        Runs("small batch", WATCHED),
        Runs("large batch", WATCHED),
        Claim(
            "With a small batch the largest logits are well below those with a large batch.",
            same(e.THREE, "small batch", "large batch", of=q.FIRST)
            + same(e.THREE, "small batch", "large batch", of=q.MIDDLE),
        ),
        columns=(q.FIRST, q.MIDDLE),
        charts=(e.first_logit, e.middle_logit),
        note=e.LARGEST + " The small batch has the large one's rates times the square root of the batches.",
        is_grid=True,
    ),
    Entry(
        "fig12",
        "zero-shot accuracy on SuperGLUE tasks",
        Runs("gpt2", WATCHED),
        Claim(
            "On most SuperGLUE tasks MERIT's model is more accurate than AdamW's and LAMB's.",
            versus("", q.constant(0), measured.wins("fig12", "AdamW"))
            + versus("", q.constant(0), measured.wins("fig12", "LAMB")),
        ),
        columns=(*_scores("fig12"), measured.average("fig12")),
        charts=(drawing.points("average accuracy (%)", measured.average("fig12")),),
        measure=measured.evaluate_on("fig12"),
    ),
    Entry(
        "fig13",
        "share of clipped elements, first, middle and last layer",
        Runs("first", ("merit",)),
        Claim(
            "The clip acts in the middle layers; in the first and the last layer it hardly ever does.",
            versus("MERIT", q.CLIPPED["first layer"], q.CLIPPED["middle layer"], "near 0 against 12%")
            + versus("MERIT", q.CLIPPED["last layer"], q.CLIPPED["middle layer"], "0.25% against 12%"),
        ),
        columns=tuple(q.CLIPPED.values()),
        charts=(
            drawing.curves("Share of clipped elements", "share of elements", q.clipped_curves, zero=True),
        ),
    ),
    Entry(
        "fig14",
        "largest attention logit of every layer",
        Runs("observed", WATCHED),
        Claim(
            "In shallow layers LAMB and MERIT both stay below AdamW; in the middle layers MERIT stays "
            "below LAMB.",
            below("LAMB", "AdamW", of=q.SHALLOW)
            + below("MERIT", "AdamW", of=q.SHALLOW)
            + below("MERIT", "LAMB", of=q.BETWEEN),
        ),
        columns=(q.SHALLOW, q.BETWEEN, q.DEEP),
        charts=(drawing.layers,),
        note=e.LARGEST,
    ),
    Entry(
        "fig15",
        "share of elements where the weight-wise bound decided",
        Runs("observed", ("merit",)),
        Claim(
            "The weight-wise bound decides for more elements late in training than early.",
            versus("MERIT", q.BOUNDED["first third"], q.BOUNDED["last third"]),
        ),
        columns=tuple(q.BOUNDED.values()),
        charts=(drawing.curves("Where the bound decided", "share of elements", q.bounded_curve, zero=True),),
    ),
    Entry(
        "table1",
        "zero-shot accuracy of MERIT with a large batch, and of AdamW with a small one",
        Runs("long, small batch", ("adamw",), series=e.REFERENCE),
        Runs("long, large batch", ("merit",)),
        Claim(
            "MERIT with a large batch is as accurate on average as AdamW with a small one, or more.",
            below(e.REFERENCE, "MERIT", of=measured.average("table1")),
        ),
        columns=(*_scores("table1"), measured.average("table1")),
        charts=(drawing.points("average accuracy (%)", measured.average("table1")),),
        rows=e.WITH_BATCH,
        note=e.MORE,
        is_grid=True,
        paper=ACCURACY,
        measure=measured.evaluate_on("table1"),
    ),
    Entry(
        "table2",
        "time of a step and TFLOP/s with AdamW, LAMB and MERIT",
        Runs("last two", WATCHED),
        Claim(
            "MERIT's step takes about 1% longer than LAMB's and AdamW's: at most the larger difference "
            "of the paper's two sizes.",
            (
                Pair(Side(q.SECONDS, "MERIT"), Side(q.longer(1.014), "AdamW")),
                Pair(Side(q.SECONDS, "MERIT"), Side(q.longer(1.010), "LAMB")),
            ),
        ),
        columns=(q.SECONDS, q.TERAFLOPS, q.OPTIMIZER_SHARE),
        charts=(drawing.points("seconds for a step", q.SECONDS),),
        note=(
            "An optimizer's share of a step falls as the batch grows. With few tokens in a step, as on a "
            "CPU, it is far larger than in the paper. `merit bench` times the optimizers alone."
        ),
        paper=SECONDS,
    ),
    Entry(
        "table3",
        "the choice of norm: validation loss with AdamW, LAMB, maxLAMB and MERIT",
        Runs("two", e.FOUR),
        Claim(
            "The max norm alone (maxLAMB) gains a little over LAMB, MERIT's other parts the rest.",
            below("MERIT", "MaxLAMB") + below("MaxLAMB", "LAMB") + below("LAMB", "AdamW"),
        ),
        note="The paper gives no learning rate for maxLAMB.",
        paper=GPT2,
    ),
    Entry(
        "table4",
        "grids of learning rates, per optimizer and size",
        Runs("gpt2", (*e.FIVE, "sophiag"), factors=e.GRID),
        Claim(
            "LAMB and MERIT want higher learning rates than AdamW (they are relative to the weights), "
            "Lion a lower one.",
            below("AdamW", "LAMB", "MERIT", of=q.BEST_RATE) + below("Lion", "AdamW", of=q.BEST_RATE),
        ),
        columns=(q.LOSS, q.LARGEST_LOGIT),
        charts=(drawing.rates,),
        note=e.INSIDE,
        is_grid=True,
    ),
    Entry(
        "theorem1",
        "MERIT-W's gradient norm on a smooth problem under the paper's bound, and its rate",
        Claim(
            "With as many samples in a batch as there are steps, MERIT-W's mean squared gradient norm "
            "stays under the theorem's bound.",
            versus("", theorem.LOG_MEASURED, theorem.LOG_BOUND),
            "theorem 1, beta2 > 0, with the constants of its proof",
            within="panel",
        ),
        Claim(
            "It falls with the number of steps T at least as fast as the bound, as 1 / sqrt(T).",
            versus("", theorem.EXPONENT, q.constant(-0.5)),
            within="",
        ),
        columns=(theorem.MEASURED, theorem.BOUND),
        charts=(drawing.theorem,),
        rows=("panel",),
        note=theorem.ABOUT,
        made_up=theorem.data,
    ),
)
"""The paper's entries, in its order."""
