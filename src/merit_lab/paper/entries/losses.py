"""Validation losses: figures 4, 6 and 9, and table 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import Records, spread_text
from merit_lab.paper.setups import WATCHED, EntryTrial, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict, paired
from merit_lab.study.charts import Axis, Chart, curve_chart
from merit_lab.tables import NOTHING, Table
from merit_lab.train.optimizer_config import MeritPart

Papers = Mapping[str, Mapping[str, float]]  # the paper's losses, by its model and series

_PAPER_GPT2: Papers = {
    "small": {"AdamW": 3.470, "LAMB": 3.355, "MaxLAMB": 3.304, "MERIT": 3.280},
    "medium": {"AdamW": 3.172, "LAMB": 3.068, "MaxLAMB": 3.040, "MERIT": 2.982},
    "large": {"AdamW": 3.039, "LAMB": 2.971, "MERIT": 2.897},
}
_PAPER_LLAMA: Papers = {
    "130M": {"AdamW": 3.277, "LAMB": 3.265, "MERIT": 3.199},
    "350M": {"AdamW": 3.014, "LAMB": 3.001, "MERIT": 2.957},
}
FOUR = ("adamw", "lamb", "maxlamb", "merit")
FIVE = (*FOUR, "lion")
LOSS = Axis("validation loss (nats per token)", ".3f")
# The part that each series leaves out.
_ABLATIONS: dict[str, MeritPart] = {
    "MERIT without clip": "clip",
    "MERIT without weight-wise bound": "weight-bound",
    "MERIT without element-wise ratio": "element-wise",
}


def loss_table(records: Records, papers: Papers) -> Table:
    """By panel and series: the paper's loss, if it gives one, ours with its spread, the runs' statuses."""
    has_paper = any(papers.get(panel) for panel in records.panels)
    rows = []
    for panel, series, runs in records.by_panel_and_series():
        paper = papers.get(panel, {}).get(series)
        rows.append(
            (
                panel,
                series,
                ", ".join(dict.fromkeys(f"{record.config.optimizer.lr:g}" for record in runs.all)),
                runs.statuses,
                *([NOTHING if paper is None else f"{paper:.3f}"] if has_paper else []),
                spread_text(runs.final_losses()),
            )
        )
    columns = ("Paper", "Ours") if has_paper else ("Validation loss",)
    return Table(("Model", "Optimizer", "Peak learning rate", "Runs", *columns), tuple(rows), num_text=4)


def below(
    records: Records, lower: str, higher: str, panel: str, papers: Papers | None = None
) -> ClaimComparison:
    """Compare two series' final losses."""
    values = (papers or {}).get(panel, {})
    has_both = lower in values and higher in values
    return paired(
        f"{lower} below {higher}{records.panel_suffix(panel)}",
        records.of(panel=panel, series=lower).final_losses(),
        records.of(panel=panel, series=higher).final_losses(),
        paper=f"{values[lower]:.3f} against {values[higher]:.3f}" if has_both else "",
        unit="nats",
    )


def loss_charts(records: Records, *, over_tokens: bool = False) -> tuple[Chart, ...]:
    """The validation loss over steps or tokens, a chart for each panel."""
    return tuple(
        curve_chart(
            records.of(panel=panel).curves("validation_loss", over_tokens=over_tokens),
            records.of(panel=panel).optimizers,
            LOSS,
            name=f"loss-{place}",
            title=f"Validation loss, {panel}",
            caption="Thin lines are single seeds, thick lines their mean; crosses mark runs that diverged.",
            is_loss=True,
            over_tokens=over_tokens,
        )
        for place, panel in enumerate(records.panels, start=1)
    )


def _by_panel(setups: Sequence[Setup], papers: Papers) -> dict[str, Mapping[str, float]]:
    return {setup.name: papers[setup.paper] for setup in setups if setup.paper in papers}


def _fig4(records: Records, scale: Scale) -> Analysis:
    papers = _by_panel(scale.gpt2, _PAPER_GPT2)
    rivals = ("AdamW", "LAMB", "Lion", "SophiaG")
    claim = Verdict(
        claim="With large batches MERIT ends at a lower validation loss than AdamW, LAMB, Lion and Sophia-G.",
        source="figure 4",
        comparisons=tuple(
            below(records, "MERIT", rival, panel, papers) for panel in records.panels for rival in rivals
        ),
    )
    return Analysis(table=loss_table(records, papers), charts=loss_charts(records), verdicts=(claim,))


def _fig6(records: Records, scale: Scale) -> Analysis:
    papers = _by_panel(scale.llama, _PAPER_LLAMA)
    claim = Verdict(
        claim="On Llama, too, MERIT ends below AdamW and LAMB.",
        source="figure 6",
        comparisons=tuple(
            below(records, "MERIT", rival, panel, papers)
            for panel in records.panels
            for rival in ("AdamW", "LAMB")
        ),
    )
    return Analysis(
        table=loss_table(records, papers),
        charts=loss_charts(records),
        verdicts=(claim,),
        notes=("The paper trains Llama on C4 and gives no learning rates; these are GPT-2's at that size.",),
    )


def _table3(records: Records, scale: Scale) -> Analysis:
    papers = _by_panel(scale.gpt2, _PAPER_GPT2)
    pairs = (("MERIT", "MaxLAMB"), ("MaxLAMB", "LAMB"), ("LAMB", "AdamW"))
    claim = Verdict(
        claim="The max norm alone (maxLAMB) gains a little over LAMB, MERIT's other parts the rest.",
        source="table 3",
        comparisons=tuple(
            below(records, lower, higher, panel, papers)
            for panel in records.panels
            for lower, higher in pairs
        ),
    )
    return Analysis(
        table=loss_table(records, papers),
        charts=loss_charts(records),
        verdicts=(claim,),
        notes=("The paper gives no learning rate for maxLAMB.",) if scale.is_large else (),
    )


def _fig9_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    setup = scale.gpt2[0]
    return [
        *scale.trials([setup], WATCHED, seeds),
        *(
            scale.trial(setup, "merit", seed, series=series, without=(part,))
            for seed in range(seeds)
            for series, part in _ABLATIONS.items()
        ),
    ]


def _fig9(records: Records, scale: Scale) -> Analysis:
    panel = scale.gpt2[0].name
    needed = Verdict(
        claim="MERIT ends higher without its clip, without the weight-wise bound, and without the "
        "element-wise ratio.",
        source="figure 9",
        comparisons=tuple(below(records, "MERIT", series, panel) for series in _ABLATIONS),
    )
    still = Verdict(
        claim="Without its clip MERIT still ends below AdamW and LAMB.",
        source="section 5.4, ablation 1",
        comparisons=tuple(below(records, "MERIT without clip", rival, panel) for rival in ("AdamW", "LAMB")),
    )
    return Analysis(
        table=loss_table(records, {}),
        charts=loss_charts(records),
        verdicts=(needed, still),
        notes=("All variants have MERIT's learning rate.",),
    )


def _reference_series(setup: Setup) -> str:
    return f"AdamW, batch {setup.batch}"


def _reference_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    return [
        *scale.trials(scale.gpt2[: len(scale.references)], FOUR, seeds),
        *(
            scale.trial(small, "adamw", seed, series=_reference_series(small), panel=large.name)
            for seed in range(seeds)
            for large, small in zip(scale.gpt2, scale.references, strict=False)
        ),
    ]


def _reference(records: Records, scale: Scale) -> Analysis:
    claim = Verdict(
        claim="With a large batch MERIT ends no higher than AdamW with a small one, after as many tokens.",
        source="abstract and table 1, which say so of accuracies",
        comparisons=tuple(
            below(records, "MERIT", _reference_series(small), large.name)
            for large, small in zip(scale.gpt2, scale.references, strict=False)
        ),
    )
    return Analysis(
        table=loss_table(records, {}),
        charts=loss_charts(records, over_tokens=True),
        verdicts=(claim,),
        notes=("Held is more than the claim: MERIT ended lower. Contradicted: it ended higher.",),
    )


ENTRIES = (
    PaperEntry(
        name="reference",
        title="Large batches against a small one",
        shows="beyond the paper: validation loss with large batches against AdamW's with a small one",
        trials=_reference_trials,
        analyse=_reference,
    ),
    PaperEntry(
        name="fig4",
        title="Figure 4: validation loss on GPT-2",
        shows="validation loss with AdamW, LAMB, Lion, Sophia-G and MERIT, large batches",
        trials=lambda scale, seeds: scale.trials(scale.gpt2, (*WATCHED, "lion", "sophiag"), seeds),
        analyse=_fig4,
    ),
    PaperEntry(
        name="fig6",
        title="Figure 6: validation loss on Llama",
        shows="validation loss with AdamW, LAMB and MERIT on Llama",
        trials=lambda scale, seeds: scale.trials(scale.llama, WATCHED, seeds),
        analyse=_fig6,
    ),
    PaperEntry(
        name="fig9",
        title="Figure 9: parts of MERIT left out",
        shows="MERIT without clip, without weight-wise bound, without element-wise ratio",
        trials=_fig9_trials,
        analyse=_fig9,
    ),
    PaperEntry(
        name="table3",
        title="Table 3: the choice of norm",
        shows="validation loss with AdamW, LAMB, maxLAMB and MERIT",
        trials=lambda scale, seeds: scale.trials(scale.gpt2[:2], FOUR, seeds),
        analyse=_table3,
    ),
)
