"""What entries say about runs that diverged and models without runs."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_records import LAYERS, Row, fake_record, fake_records, logits, losses
from toy_scale import make_scale

from merit_lab.paper.entry import Analysis
from merit_lab.paper.records import Records, TrialRecord
from merit_lab.paper.registry import ENTRIES
from merit_lab.paper.setups import EntryTrial, Scale
from merit_lab.runs import Measurements, step_path


def some_diverged(
    name: str, scale: Scale, rows: Callable[[EntryTrial], list[Row]], diverged: Callable[[EntryTrial], bool]
) -> Records:
    """Three seeds of an entry's runs; those that ``diverged`` selects diverged after the same rows."""
    return Records(
        tuple(
            fake_record(trial, rows(trial), "diverged" if diverged(trial) else "finished")
            for trial in ENTRIES[name].trials(scale, 3)
        )
    )


def two_sizes() -> Scale:
    """A scale with two GPT-2 models, the second twice as deep, like the paper's medium."""
    scale = make_scale()
    (small,) = scale.gpt2
    deep = dataclasses.replace(small.model, layers=2 * small.model.layers)
    return dataclasses.replace(scale, gpt2=(small, dataclasses.replace(small, name="deep toy", model=deep)))


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ("theorem1", "table2")])
def test_an_entry_whose_runs_all_diverged_is_undecided(name: str, toy: Scale) -> None:
    result = ENTRIES[name].analyse(some_diverged(name, toy, lambda _: [], lambda _: True), toy)
    assert result.outcome == "undecided"
    for verdict in result.verdicts:
        assert verdict.comparisons
        assert all(comparison.judgement not in ("", "not run") for comparison in verdict.comparisons)


@pytest.mark.parametrize("name", ["fig2", "fig14", "horizon"])
def test_a_diverged_run_loses_however_small_its_logits_were(name: str, toy: Scale) -> None:
    def rows(trial: EntryTrial) -> list[Row]:
        return losses(trial, 3.0) + logits(trial, LAYERS * [1.0 if trial.series == "AdamW" else 20.0])

    result = ENTRIES[name].analyse(some_diverged(name, toy, rows, lambda trial: trial.series == "AdamW"), toy)
    against = [
        comparison for comparison in result.verdicts[-1].comparisons if "below AdamW" in comparison.label
    ]
    assert against
    assert all(comparison.margins == (math.inf,) * 3 for comparison in against)


def update_rows(trial: EntryTrial, last: float) -> list[Row]:
    """Statistics of nine steps; the last step's is ``last``."""
    values = [0.1 * (1 + 0.01 * trial.config.seed**2) * step for step in range(1, 9)] + [last]
    kinds = ("clipped", "bounded", "relative_change")
    return [
        {
            "kind": "update",
            "step": step,
            "parameters": {f"blocks.{i}.mlp.up.weight": dict.fromkeys(kinds, value) for i in range(LAYERS)},
        }
        for step, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize("name", ["fig13", "fig15", "reach"])
def test_updates_of_a_run_that_diverged_are_drawn_and_not_compared(name: str, toy: Scale) -> None:
    """Its last update is not a number, and its last third is not that of a whole run."""
    records = some_diverged(
        name,
        dataclasses.replace(toy, gpt2=(dataclasses.replace(toy.gpt2[0], tokens=9 * 8 * 16),)),
        lambda trial: update_rows(trial, math.nan if trial.config.seed == 1 else 0.9),
        lambda trial: trial.config.seed == 1,
    )
    result = ENTRIES[name].analyse(records, toy)
    specs = json.dumps([chart.spec for chart in result.charts], allow_nan=False)
    assert "cross" in specs
    assert [comparison.num_seeds for comparison in result.verdicts[0].comparisons] == [2] * len(
        result.verdicts[0].comparisons
    )


def curvature(record: TrialRecord, folder: Path, top: float) -> TrialRecord:
    """The record of a run whose curvature was measured."""
    parts = {
        "eigenvalues": {"values": [top]},
        "trace": {"value": 100 * top},
        "density": {"grid": [-1.0, 0.0, top], "density": [0.1, 1.0, 0.1]},
    }
    path = step_path(folder / "curvature", record.config.steps or 0).with_suffix(".json")
    measured = Measurements(path)
    for name, part in parts.items():
        measured.put(name, {}, part)
    return dataclasses.replace(record, folder=folder)


def test_curvature_where_runs_diverged(toy: Scale, tmp_path: Path) -> None:
    """AdamW diverged with the first seed; the chart shows the spectrum of the second."""
    unmeasured = some_diverged(
        "fig7", toy, lambda _: [], lambda trial: trial.series == "AdamW" and trial.config.seed == 0
    )
    records = Records(
        tuple(
            record if record.diverged else curvature(record, tmp_path / str(place), 10.0 + place)
            for place, record in enumerate(unmeasured.all)
        )
    )
    result = ENTRIES["fig7"].analyse(records, toy)
    for comparison in result.verdicts[0].comparisons:
        assert comparison.num_seeds == 3
        assert max(comparison.margins) == math.inf
    rows = [row for data in result.charts[0].spec["datasets"].values() for row in data]
    assert {row["series"] for row in rows} == {"AdamW", "MERIT"}


def test_figure_1_is_not_run_if_a_model_has_no_runs() -> None:
    scale, entry = two_sizes(), ENTRIES["fig1"]
    final = {"MERIT": 3.0, "LAMB": 3.4, "AdamW": 3.5}

    def rows(trial: EntryTrial) -> list[Row]:
        return losses(trial, 3.0 if trial.config.batch == 4 else final[trial.series])

    records = fake_records(entry, scale, rows, seeds=5)
    first, second = records.panels
    assert entry.analyse(records.of(panel=first), scale).outcome == "held"
    missing = tuple(
        dataclasses.replace(record, run=None) if record.panel == second else record for record in records.all
    )
    result = entry.analyse(Records(missing), scale)
    assert result.outcome == "not run"
    assert [len(verdict.comparisons) for verdict in result.verdicts] == [4, 4]
    assert len(result.charts) == 1


def ideal_line(result: Analysis) -> dict[float, float]:
    """The points of the dotted line in the first chart, which belongs to no series."""
    return {
        row["x"]: row["value"]
        for rows in result.charts[0].spec["datasets"].values()
        for row in rows
        if "series" not in row
    }


def test_ideal_scaling_starts_at_the_best_run_even_if_small_batches_diverged(toy: Scale) -> None:
    """MERIT's line then starts at the larger batch, with fewer steps but as many tokens as the others."""

    def lost(trial: EntryTrial) -> bool:
        return trial.series == "MERIT" and trial.config.batch == 4

    whole = some_diverged("fig1", toy, lambda trial: losses(trial, 3.0), lambda _: False)
    some = some_diverged("fig1", toy, lambda trial: [] if lost(trial) else losses(trial, 3.0), lost)
    expected, actual = (ideal_line(ENTRIES["fig1"].analyse(records, toy)) for records in (whole, some))
    assert actual == pytest.approx(expected, rel=0.01)


def test_layers_are_counted_for_each_size() -> None:
    """With MERIT, only the deep model's last layer and the other's middle layer have large logits."""
    scale, entry = two_sizes(), ENTRIES["logits"]
    small, deep = scale.gpt2

    def rows(trial: EntryTrial) -> list[Row]:
        num_layers = trial.config.model.layers
        values = num_layers * [10.0]
        if trial.series == "MERIT" and trial.panel == deep.name:
            values[-1] = 100.0
        if trial.series == "MERIT" and trial.panel == small.name:
            values[1] = 40.0
        return logits(trial, values)

    result = entry.analyse(fake_records(entry, scale, rows, seeds=1), scale)
    cells = {row[:2]: row[3:] for row in result.table.rows}
    assert result.table.head[3:] == ("First layer", "Middle layer", "Mean of all layers")
    assert cells[small.name, "MERIT"] == ("10.00", "40.00", "20.00")
    assert cells[deep.name, "MERIT"] == ("10.00", "10.00", "25.00")
    margins = {comparison.label: comparison.margins for comparison in result.verdicts[0].comparisons}
    assert margins[f"MERIT below LAMB, mean of all layers, {deep.name}"] == (-15.0,)


def test_an_exploding_loss_does_not_hide_the_others(toy: Scale) -> None:
    """Its cross is at the edge of the chart."""
    result = ENTRIES["fig4"].analyse(
        some_diverged(
            "fig4",
            toy,
            lambda trial: losses(trial, 1e6 if trial.series == "AdamW" else 3.0),
            lambda trial: trial.series == "AdamW",
        ),
        toy,
    )
    (chart,) = result.charts
    cross = chart.spec["layer"][-1]
    assert cross["mark"]["shape"] == "cross"
    low, high = cross["encoding"]["y"]["scale"]["domain"]
    assert 2.5 < low < 3.0 < high < 5.5
    crosses = chart.spec["datasets"][cross["data"]["name"]]
    assert [row["value"] for row in crosses] == [high] * 3
