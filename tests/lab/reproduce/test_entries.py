"""Every entry, from its runs to its files, at a scale of a few steps."""

import csv
import json
from pathlib import Path

import pytest

from merit_optim.lab.data import Dataset
from merit_optim.lab.reproduce.registry import ENTRIES
from merit_optim.lab.reproduce.scale import Scale
from merit_optim.lab.reproduce.work import Task, reproduce

EVALUATIONS = ("fig5", "fig12", "table1")
OUTCOMES = {"held", "contradicted", "undecided", "no test", "not run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all entries, as their runs are."""
    return tmp_path_factory.mktemp("reproduce")


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in EVALUATIONS])
def test_an_entry_is_made_from_its_runs(name: str, toy: Scale, dataset: Dataset, folder: Path) -> None:
    entry = ENTRIES[name]
    (said,) = reproduce(Task(entries=[entry], scale=toy, dataset=dataset, folder=folder))
    assert said == json.loads((folder / name / "verdict.json").read_text())
    assert (folder / name / "index.html").exists()
    assert entry.title in (folder / "index.html").read_text()
    assert said.get("missing") is None
    assert said["outcome"] in OUTCOMES - {"not run"}
    assert all(own["comparisons"] for own in said["verdicts"])
    rows = list(csv.reader((folder / name / "table.csv").read_text().splitlines()))
    assert len(rows) > 1
    assert (folder / name / "table.md").read_text().count("\n") == len(rows) + 1
    pictures = list((folder / name).glob("*.svg"))
    assert pictures
    assert all(picture.read_text().startswith("<svg") for picture in pictures)


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_without_its_sets_says_what_is_missing(
    name: str, toy: Scale, dataset: Dataset, folder: Path
) -> None:
    (said,) = reproduce(Task(entries=[ENTRIES[name]], scale=toy, dataset=dataset, folder=folder))
    assert said["outcome"] == "not run"
    assert "--task-files" in said["missing"]
    assert said["missing"].partition(":")[0] in (folder / name / "index.html").read_text()
