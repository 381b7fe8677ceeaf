"""Every entry, from its runs to its files, at a scale of a few steps."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_records import evaluated, fake_records, logits

from merit_lab.data import Dataset
from merit_lab.paper import heatmaps
from merit_lab.paper.corpus import KnownCorpus
from merit_lab.paper.entries import weights
from merit_lab.paper.entry import Unavailable
from merit_lab.paper.registry import ENTRIES
from merit_lab.paper.setups import Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.study import charts

EVALUATIONS = ("fig5", "fig12", "table1")
OUTCOMES = {"held", "contradicted", "undecided", "no test", "not run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all entries, as their runs are."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in EVALUATIONS])
def test_an_entry_is_made_from_its_runs(name: str, toy: Scale, dataset: Dataset, folder: Path) -> None:
    entry = ENTRIES[name]
    (verdict,) = reproduce(Task(entries=[entry], scale=toy, corpus=dataset, folder=folder))
    assert verdict == json.loads((folder / name / "verdict.json").read_text())
    assert (folder / name / "index.html").exists()
    assert entry.title in (folder / "index.html").read_text()
    assert verdict.get("missing") is None
    assert verdict["outcome"] in OUTCOMES - {"not run"}
    assert all(claim["comparisons"] for claim in verdict["verdicts"])
    rows = list(csv.reader((folder / name / "table.csv").read_text().splitlines()))
    assert len(rows) > 1
    assert (folder / name / "table.md").read_text().count("\n") == len(rows) + 1
    runs = list(csv.reader((folder / name / "runs.csv").read_text().splitlines()))
    assert len(runs) == 1 + len(entry.trials(toy, entry.num_seeds(toy, None)))
    pictures = list((folder / name).glob("*.svg"))
    assert pictures
    assert all(picture.read_text().startswith("<svg") for picture in pictures)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_without_its_sets_says_what_is_missing(
    name: str, toy: Scale, dataset: Dataset, folder: Path
) -> None:
    (verdict,) = reproduce(Task(entries=[ENTRIES[name]], scale=toy, corpus=dataset, folder=folder))
    assert verdict["outcome"] == "not run"
    assert "--task-files" in verdict["missing"]
    assert verdict["missing"].partition(":")[0] in (folder / name / "index.html").read_text()


def test_measured_curvature_needs_no_data(dataset: Dataset, tmp_path: Path, toy: Scale) -> None:
    here = Dataset.open(shutil.copytree(dataset.folder, tmp_path / "data"))
    task = Task(entries=[ENTRIES["fig7"]], scale=toy, corpus=here, folder=tmp_path / "out", seeds=1)
    before = reproduce(task)
    gone = KnownCorpus(Path("gone"), here.vocab_size, here.fingerprint)
    again = replace(task, corpus=gone, trains=False)
    assert reproduce(again) == before
    for other in (replace(toy, curvature_probes=3), replace(toy, curvature_sequences=3)):  # not measured
        (verdict,) = reproduce(replace(again, scale=other))
        assert verdict["missing"] == (
            "Curvature needs the runs' data, which are not in gone: give them with --data"
        )


def test_curvature_of_an_earlier_checkpoint_does_not_count(
    dataset: Dataset, tmp_path: Path, toy: Scale
) -> None:
    task = Task(entries=[ENTRIES["fig7"]], scale=toy, corpus=dataset, folder=tmp_path, seeds=1)
    before = reproduce(task)
    for end in tmp_path.glob("runs/*/curvature/step-00000004.json"):
        end.rename(end.with_name("step-00000002.json"))
    gone = KnownCorpus(Path("gone"), dataset.vocab_size, dataset.fingerprint)
    (verdict,) = reproduce(replace(task, corpus=gone, trains=False))
    assert "give them with --data" in verdict["missing"]
    assert reproduce(task) == before
    assert len(list(tmp_path.glob("runs/*/curvature/step-00000004.json"))) == 2


@pytest.mark.parametrize("name", ["fig3", "fig10"])
def test_missing_weights_affect_only_their_entry(
    name: str, dataset: Dataset, tmp_path: Path, toy: Scale
) -> None:
    task = Task(entries=[ENTRIES[name]], scale=toy, corpus=dataset, folder=tmp_path, seeds=1)
    (made,) = reproduce(task)
    for path in tmp_path.glob("runs/*/checkpoints/*/*.safetensors"):
        path.write_bytes(b"")
    weights._weights.cache_clear()  # as in a new process
    both = replace(task, entries=[ENTRIES[name], ENTRIES["fig13"]])
    verdict, fine = reproduce(both)
    assert "was changed" in verdict["missing"]
    assert fine["outcome"] == "no test"

    for path in tmp_path.glob("runs/*/checkpoints"):
        shutil.rmtree(path)
    verdict, fine = reproduce(both)
    assert verdict["missing"].startswith("The runs have no weights")
    assert json.loads((tmp_path / name / "verdict.json").read_text()) == made  # from before


@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluated_sets_need_no_files(name: str, toy: Scale, tmp_path: Path) -> None:
    (record, *_) = evaluated(ENTRIES[name], toy, tmp_path, lambda _: 0.5, seeds=1).all
    measure = ENTRIES[name].measure
    assert measure is not None
    measure(record, toy, None)
    next((record.folder / "evaluate").glob("*/*.json")).unlink()
    with pytest.raises(Unavailable, match="--task-files"):
        measure(record, toy, None)


def test_charts_are_vega_lite(toy: Scale) -> None:
    """Charts are made without altair's schema checks, which take seconds; here they are checked."""
    import altair as alt

    points = [(0, 1.0), (10, 2.0)]
    axis = charts.Axis("x", logarithmic=False)
    labels = {"name": "n", "title": "t", "caption": "c"}
    lines = {"MERIT": [("a", points, True), ("b", points, False)]}
    rows = [{"group": "g", "series": "MERIT", "value": 1.0}]
    records = fake_records(ENTRIES["fig14"], toy, lambda trial: logits(trial, [1.0, 2.0, 3.0]))
    made = [
        charts.line_chart(lines, {"MERIT": "merit"}, axis, axis, ideal=points, **labels),
        charts.strip_chart(rows, {"MERIT": "merit"}, axis, **labels),
        heatmaps.layer_chart(records, (1.0, 2.0), **labels),
        heatmaps.matrix_chart([[1.0, 2.0]], rows="r", columns="c", **labels),
    ]
    for chart in made:
        kind = alt.LayerChart if "layer" in chart.spec else alt.Chart
        kind.from_dict(chart.spec).to_dict(validate=True)
