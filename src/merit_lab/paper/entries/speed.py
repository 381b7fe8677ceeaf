"""The time of a step: table 2."""

from __future__ import annotations

import statistics

from merit_lab.models import flops_per_token
from merit_lab.paper.entry import Analysis, PaperEntry
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import WATCHED, Scale, Setup
from merit_lab.paper.verdict import ClaimComparison, Verdict
from merit_lab.study.charts import Axis, strip_chart
from merit_lab.tables import NOTHING, Table

# Seconds of a step and TFLOP/s on the paper's A100s.
_PAPER = {
    "medium": {"AdamW": (57.69, 44.05), "LAMB": (57.93, 43.86), "MERIT": (58.50, 43.43)},
    "large": {"AdamW": (242.50, 43.91), "LAMB": (243.51, 43.73), "MERIT": (245.46, 43.38)},
}
_SHARE = (
    "An optimizer's share of a step falls as the batch grows. With few tokens in a step, as on a CPU, it is "
    "far larger than in the paper. `merit bench` times the optimizers alone."
)
_MOST = {"AdamW": 0.014, "LAMB": 0.010}  # relative to theirs, the larger of the paper's two sizes


def _setups(scale: Scale) -> tuple[Setup, ...]:
    return scale.gpt2[-2:]


def step_seconds(record: TrialRecord) -> float | None:
    """The median time of a step, hardly affected by the steps that include measurements."""
    speed = _median(record, "tokens_per_second")
    return None if speed is None else record.tokens_per_step / speed


def _optimizer_share(record: TrialRecord) -> float | None:
    """The optimizer's median share of a step; None for older runs, which did not measure it."""
    return _median(record, "optimizer_share")


def _median(record: TrialRecord, curve: str) -> float | None:
    values = [value for _, value in record.points(curve)]
    return statistics.median(values) if values else None


def _teraflops(record: TrialRecord) -> float | None:
    seconds, flops = step_seconds(record), flops_per_token(record.config.model)
    return None if seconds is None or flops is None else record.tokens_per_step * flops / seconds / 1e12


def _no_longer(records: Records, rival: str, panel: str, paper: str) -> ClaimComparison:
    merit = records.of(panel=panel, series="MERIT").by_seed(step_seconds)
    other = records.of(panel=panel, series=rival).by_seed(step_seconds)
    most = _MOST[rival]
    return ClaimComparison(
        label=f"MERIT's step at most {most:.1%} longer than {rival}'s{records.panel_suffix(panel)}",
        paper=paper,
        margins=tuple(most - (merit[seed] / other[seed] - 1) for seed in sorted(merit.keys() & other.keys())),
        unit="of a step to spare",
    )


def _table2(records: Records, scale: Scale) -> Analysis:
    papers = {setup.name: _PAPER[setup.paper] for setup in _setups(scale) if setup.paper in _PAPER}
    rows = []
    points = []
    for panel, series, runs in records.by_panel_and_series():
        paper = papers.get(panel, {}).get(series)
        seconds: BySeed = runs.by_seed(step_seconds)
        points += [{"group": panel, "series": series, "value": value} for value in seconds.values()]
        rows.append(
            (
                panel,
                series,
                runs.statuses,
                NOTHING if paper is None else f"{paper[0]:.2f}",
                spread_text(seconds, ".4f"),
                NOTHING if paper is None else f"{paper[1]:.2f}",
                spread_text(runs.by_seed(_teraflops), ".4g"),
                spread_text(runs.by_seed(_optimizer_share), ".2%"),
            )
        )
    head = (
        "Model",
        "Optimizer",
        "Runs",
        "Seconds, paper",
        "Seconds, ours",
        "TFLOP/s, paper",
        "TFLOP/s, ours",
        "Optimizer's share",
    )
    comparisons = []
    for panel in records.panels:
        for rival in ("AdamW", "LAMB"):
            known = papers.get(panel)
            text = f"{known['MERIT'][0] / known[rival][0] - 1:+.1%}" if known else ""
            comparisons.append(_no_longer(records, rival, panel, text))
    claim = Verdict(
        claim="MERIT's step takes about 1% longer than LAMB's and AdamW's.",
        source="table 2",
        comparisons=tuple(comparisons),
    )
    chart = strip_chart(
        points,
        records.optimizers,
        Axis("seconds for a step", ".3~g", from_zero=True),
        name="step-time",
        title="Time of a step",
        caption="Median over the steps of a run, forward and backward pass included.",
    )
    return Analysis(
        table=Table(head, tuple(rows), num_text=3),
        charts=(chart,),
        verdicts=(claim,),
        notes=(_SHARE,),
    )


ENTRIES = (
    PaperEntry(
        name="table2",
        title="Table 2: time of a step",
        shows="time of a step and TFLOP/s with AdamW, LAMB and MERIT",
        trials=lambda scale, seeds: scale.trials(_setups(scale), WATCHED, seeds),
        analyse=_table2,
    ),
)
