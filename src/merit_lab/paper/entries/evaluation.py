"""Zero-shot evaluation: figures 5 and 12, and table 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from merit_lab.measure.evaluate.command import evaluate
from merit_lab.measure.evaluate.sets import PAPER_SETS
from merit_lab.paper.entry import Analysis, PaperEntry, Unavailable
from merit_lab.paper.records import BySeed, Records, TrialRecord, spread_text
from merit_lab.paper.setups import WATCHED, EntryTrial, Scale
from merit_lab.paper.verdict import Verdict, paired
from merit_lab.results.gather import DISPLAY_NAMES
from merit_lab.runs import Measurements, step_path
from merit_lab.study.charts import Axis, Chart, strip_chart
from merit_lab.tables import Table

_PERPLEXITY = {"lambada": "perplexity", "wikitext": "word_perplexity"}
_PAPER_AVERAGES = {  # table 1, in percent: AdamW with a small batch, MERIT with a large one
    "GPT-2 small": (43.56, 43.87),
    "GPT-2 medium": (46.59, 46.70),
}
_LONG_ENOUGH = 512  # tokens of context that fit every answer of every set
_NO_FILES = (
    "The evaluation sets are missing: give their folder with --task-files (`merit evaluate -h` lists the "
    "files), or use scale small or paper, which load them from the Hugging Face hub."
)


def _measure(name: str) -> Callable[[TrialRecord, Scale, Path | None], None]:
    def measure(record: TrialRecord, scale: Scale, task_files: Path | None) -> None:
        if task_files is None:
            if len(_values(record, PAPER_SETS[name], scale)) == len(PAPER_SETS[name]):
                return  # evaluated before, wherever the sets came from
            if scale.makes_data:
                raise Unavailable(_NO_FILES)
        try:
            evaluate(record.folder, [name], task_files=task_files, limit=scale.evaluation_limit)
        except (ModuleNotFoundError, ConnectionError) as error:
            raise Unavailable(str(error)) from None
        except ValueError as error:
            context = record.config.model.context
            way_out = "" if context >= _LONG_ENOUGH else "; a larger scale has models with longer contexts"
            raise Unavailable(f"{error}{way_out}") from None

    return measure


def _values(record: TrialRecord, sets: Sequence[str], scale: Scale) -> dict[str, float]:
    """The perplexity, or the accuracy in percent, of each set that has been evaluated.

    A run that diverged counts as worse than any other: leaving it out would keep only the good seeds.
    """
    if record.diverged:
        return {name: math.inf if name in _PERPLEXITY else -math.inf for name in sets}
    if record.run is None or record.config.steps is None:
        return {}
    path = step_path(record.folder / "evaluate", record.config.steps).with_suffix(".json")
    parts, limit = Measurements(path).parts, scale.evaluation_limit
    values = {}
    for name in sets:
        part = parts.get(name if limit is None else f"{name}-first-{limit}")
        if part is not None:
            is_accuracy = name not in _PERPLEXITY
            value = part["result"]["acc" if is_accuracy else _PERPLEXITY[name]]
            values[name] = value * (100 if is_accuracy else 1)
    return values


def _by_set(records: Records, name: str, scale: Scale) -> BySeed:
    return records.by_seed(lambda record: _values(record, [name], scale).get(name))


def _average(records: Records, sets: Sequence[str], scale: Scale) -> BySeed:
    """The mean over sets by seed, for runs that have all of them."""
    values = {record.config.seed: _values(record, sets, scale) for record in records.all}
    return {
        seed: statistics.fmean(by_set.values()) for seed, by_set in values.items() if len(by_set) == len(sets)
    }


def _table(records: Records, sets: Sequence[str], scale: Scale, *, number: str, average: bool) -> Table:
    rows = []
    for panel, series, runs in records.by_panel_and_series():
        cells = [spread_text(_by_set(runs, name, scale), number) for name in sets]
        if average:
            cells.append(spread_text(_average(runs, sets, scale), number))
        rows.append((panel, series, runs.statuses, *cells))
    head = ("Model", "Optimizer", "Runs", *sets, *(["average"] if average else []))
    return Table(head, tuple(rows), num_text=3)


def _points(records: Records, sets: Sequence[str], scale: Scale) -> list[dict[str, object]]:
    return [
        {"panel": record.panel, "group": name, "series": record.series, "value": value}
        for record in records.all
        for name, value in _values(record, sets, scale).items()
        if math.isfinite(value)
    ]


def _notes(scale: Scale) -> tuple[str, ...]:
    if scale.evaluation_limit is None:
        return ()
    limit = (
        f"Only the first {scale.evaluation_limit} items of each set: models of this scale cannot answer "
        "them, and the numbers only show that the path from training to evaluation works."
    )
    return (limit,)


def _fig5(records: Records, scale: Scale) -> Analysis:
    sets = PAPER_SETS["fig5"]
    claim = Verdict(
        claim="On LAMBADA and WikiText MERIT's models have a lower perplexity than AdamW's and LAMB's.",
        source="figure 5",
        comparisons=tuple(
            paired(
                f"MERIT below {rival} on {name}{records.panel_suffix(panel)}",
                _by_set(records.of(panel=panel, series="MERIT"), name, scale),
                _by_set(records.of(panel=panel, series=rival), name, scale),
                unit="of the higher",
                relative=True,
            )
            for panel in records.panels
            for name in sets
            for rival in ("AdamW", "LAMB")
        ),
    )
    charts = tuple(
        strip_chart(
            [{**row, "group": row["panel"]} for row in _points(records, [name], scale)],
            records.optimizers,
            Axis("perplexity", ".3~s", logarithmic=True),
            name=name,
            title=f"Perplexity on {name}",
            caption="A point for each seed, a bar at their mean.",
        )
        for name in sets
    )
    table = _table(records, sets, scale, number=".4g", average=False)
    return Analysis(table=table, charts=charts, verdicts=(claim,), notes=_notes(scale))


def _fig12(records: Records, scale: Scale) -> Analysis:
    sets = PAPER_SETS["fig12"]
    comparisons = []
    for panel in records.panels:
        merit = records.of(panel=panel, series="MERIT")
        for rival in ("AdamW", "LAMB"):
            other = records.of(panel=panel, series=rival)
            wins: dict[int, float] = {}
            for name in sets:
                ours, theirs = _by_set(merit, name, scale), _by_set(other, name, scale)
                for seed in ours.keys() & theirs.keys():
                    difference = ours[seed] - theirs[seed]  # NaN if both diverged
                    won = math.nan if math.isnan(difference) else (difference > 0) - (difference < 0)
                    wins[seed] = wins.get(seed, 0.0) + won
            comparisons.append(
                paired(
                    f"tasks where MERIT is above {rival}, less those where it is below"
                    f"{records.panel_suffix(panel)}",
                    dict.fromkeys(wins, 0.0),
                    wins,
                    paper="most of 7",
                    unit="tasks",
                )
            )
    claim = Verdict(
        claim="On most SuperGLUE tasks MERIT's model is more accurate than AdamW's and LAMB's.",
        source="figure 12",
        comparisons=tuple(comparisons),
    )
    return Analysis(
        table=_table(records, sets, scale, number=".1f", average=True),
        charts=_accuracies(records, sets, scale),
        verdicts=(claim,),
        notes=_notes(scale),
    )


def _accuracies(records: Records, sets: Sequence[str], scale: Scale) -> tuple[Chart, ...]:
    """The accuracy on each set, a chart for each panel."""
    return tuple(
        strip_chart(
            _points(records.of(panel=panel), sets, scale),
            records.of(panel=panel).optimizers,
            Axis("accuracy (%)", ".3~g"),
            name=f"accuracy-{place}",
            title=f"Zero-shot accuracy, {panel}",
            caption="A point for each seed, a bar at their mean.",
        )
        for place, panel in enumerate(records.panels, start=1)
    )


def _long_trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    trials = []
    for seed in range(seeds):
        for small, large in zip(scale.long[::2], scale.long[1::2], strict=True):
            for setup, name in ((small, "adamw"), (large, "merit")):
                series = f"{DISPLAY_NAMES[name]}, batch {setup.batch}"
                trials.append(scale.trial(setup, name, seed, series=series, panel=large.model_name))
    return trials


def _table1(records: Records, scale: Scale) -> Analysis:
    sets = PAPER_SETS["table1"]
    comparisons = []
    for panel in records.panels:
        runs = records.of(panel=panel)
        small, large = runs.series
        paper = _PAPER_AVERAGES.get(panel)
        comparisons.append(
            paired(
                f"{small} below {large}, average accuracy{records.panel_suffix(panel)}",
                _average(runs.of(series=small), sets, scale),
                _average(runs.of(series=large), sets, scale),
                paper=f"{paper[0]:.2f} against {paper[1]:.2f}" if paper else "",
                unit="percent",
            )
        )
    claim = Verdict(
        claim="MERIT with a large batch is as accurate on average as AdamW with a small one, or more.",
        source="table 1",
        comparisons=tuple(comparisons),
    )
    return Analysis(
        table=_table(records, sets, scale, number=".2f", average=True),
        charts=_accuracies(records, sets, scale),
        verdicts=(claim,),
        notes=(
            "Held is more than the claim: MERIT was more accurate. Contradicted: it was less accurate.",
            *_notes(scale),
        ),
    )


def _trials(scale: Scale, seeds: int) -> list[EntryTrial]:
    return scale.trials(scale.gpt2, WATCHED, seeds)


ENTRIES = (
    PaperEntry(
        name="fig5",
        title="Figure 5: zero-shot perplexity",
        shows="zero-shot perplexity on LAMBADA and WikiText",
        trials=_trials,
        analyse=_fig5,
        measure=_measure("fig5"),
    ),
    PaperEntry(
        name="fig12",
        title="Figure 12: zero-shot accuracy on SuperGLUE",
        shows="zero-shot accuracy on SuperGLUE tasks with AdamW, LAMB and MERIT",
        trials=_trials,
        analyse=_fig12,
        measure=_measure("fig12"),
    ),
    PaperEntry(
        name="table1",
        title="Table 1: a large batch with MERIT against a small one with AdamW",
        shows="zero-shot accuracy on ARC, COPA, HellaSwag, RACE and WiC, large batch against small",
        trials=_long_trials,
        analyse=_table1,
        measure=_measure("table1"),
        is_grid=True,
    ),
)
