"""docs/results.md says nothing that the records under results/ do not."""

import json
import re
from pathlib import Path

import pytest

from merit_lab.record import Run, archive, excerpt, run_folders
from merit_lab.report import find_runs, group, read_outcomes
from merit_lab.report.figures import unchecked
from merit_lab.report.tables import series_table
from merit_lab.reproduce import records
from merit_lab.reproduce.corpus import recall
from merit_lab.reproduce.registry import ENTRIES
from merit_lab.reproduce.scales import SCALES
from merit_lab.reproduce.work import Task

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
STUDIES = [
    "nano",
    "nano/repeats",
    "gpt2-small",
    "directions/10m",
    "directions/33m",
    "directions/10m-batch64",
    "directions/33m-batch64",
]


def table_rows(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not set(row) <= set("|-: ")]


def test_every_row_of_a_table_is_in_a_table_of_the_records() -> None:
    known = {row for path in ROOT.glob("results/**/table.md") for row in table_rows(path.read_text("utf-8"))}
    told = table_rows(PAGE.read_text("utf-8"))
    assert len(told) > 10
    assert [row for row in told if row not in known] == []


def test_every_p_value_is_of_a_verdict() -> None:
    verdicts = "".join(path.read_text("utf-8") for path in ROOT.glob("results/**/verdict.json"))
    told = re.findall(r"p = [0-9.]+(?:e-[0-9]+)?", PAGE.read_text("utf-8"))
    assert told
    assert [value for value in told if value.rstrip(".") not in verdicts] == []


@pytest.mark.parametrize("study", STUDIES)
def test_records_name_their_data_and_no_machine(study: str) -> None:
    """All are of the same text."""
    data = json.loads((ROOT / "results/nano/data.json").read_text("utf-8"))
    runs = [Run.open(folder) for folder in run_folders(ROOT / "results" / study)]
    assert runs
    for run in runs:
        assert run.environment["data"]["fingerprint"] == data["fingerprint"]
        assert not {"host", "folder", "command"} & run.environment.keys()
        assert "/" not in run.config["data"]


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_kept_of_kept_runs_is_all_of_it(study: str, tmp_path: Path) -> None:
    runs = [Run.open(folder) for folder in run_folders(ROOT / "results" / study)]
    archive.add(tmp_path / "runs.parquet", map(excerpt, runs))
    for run in runs:
        again = Run.open(tmp_path / run.name)
        assert (again.config, again.environment) == (run.config, run.environment)
        assert repr(list(again.lines())) == repr(list(run.lines()))


@pytest.mark.parametrize(
    "study", ["directions/10m", "directions/33m", "directions/10m-batch64", "directions/33m-batch64"]
)
def test_tables_of_directions_are_made_again(study: str) -> None:
    folder = ROOT / "results" / study
    outcomes = read_outcomes(group(find_runs([folder])))
    assert series_table(outcomes).markdown() == (folder / "table.md").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("results/nano/*/table.md")))
def test_tables_of_entries_are_made_again(name: str) -> None:
    folder = ROOT / "results" / "nano"
    corpus = recall(folder)
    assert corpus is not None
    entry = ENTRIES[name]
    seeds = 3 if name in ("horizon", "warmup") else None  # as docs/results.md has it
    task = Task(
        entries=[entry], scale=SCALES["nano"], corpus=corpus, folder=folder, seeds=seeds, trains=False
    )
    with unchecked():
        result = entry.analyse(records.read(task.plan(entry)), task.scale)
    assert result.table.markdown() == (folder / name / "table.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("told", "made"),
    [
        ("reach", "nano/reach/reach-1"),
        ("logits", "nano/fig2/logit-1"),
        ("rates", "nano/table4/rates-2"),
        ("warmup", "nano/warmup/rates-1"),
        ("horizon", "nano/horizon/loss-2"),
        ("gpt2-small", "gpt2-small/report/figures/max-logit"),
    ],
)
def test_pictures_are_those_of_the_records(told: str, made: str) -> None:
    picture = (ROOT / "docs" / "images" / f"{told}.svg").read_bytes()
    assert picture == (ROOT / "results" / f"{made}.svg").read_bytes()
