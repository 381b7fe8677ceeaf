"""The pages with results say nothing that the records under results/ do not."""

import json
import re
import sys
from pathlib import Path

import pytest

from merit_lab.paper import records
from merit_lab.paper.corpus import recall
from merit_lab.paper.registry import ENTRIES
from merit_lab.paper.scales import SCALES
from merit_lab.paper.work import Task
from merit_lab.results.figures import unchecked
from merit_lab.runs import Run, archive, excerpt, run_folders

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "scripts"))
import evidence  # noqa: E402  # scripts of the documentation

PAPER_PAGE = ROOT / "docs" / "paper-results.md"
DIRECTIONS = sorted(f"directions/{folder.name}" for folder in (ROOT / "results/directions").iterdir())
MIX = sorted(f"mix/{folder.name}" for folder in (ROOT / "results/mix").iterdir() if folder.is_dir())
SIZES = sorted(f"sizes/{folder.name}" for folder in (ROOT / "results/sizes").iterdir() if folder.is_dir())
ARENAS = sorted(f"arena/{folder.name}" for folder in (ROOT / "results/arena").iterdir())
STUDIES = ["nano", "nano/repeats", "gpt2-small", *DIRECTIONS, *MIX, *SIZES, *ARENAS]


def table_rows(text: str) -> list[str]:
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if not set(row) <= set("|-: ")]


@pytest.mark.parametrize("page", evidence.PAGES)
def test_tables_are_those_of_the_records(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert "<!-- table: " in text
    assert evidence.with_tables(text) == text, "run python docs/scripts/evidence.py"


def test_every_table_of_the_records_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text("utf-8") for page in evidence.PAGES)
    assert [name for name in evidence.TABLES if f"<!-- table: {name} -->" not in text] == []


def test_every_row_of_a_table_is_in_a_table_of_the_records() -> None:
    known = {row for path in ROOT.glob("results/**/table.md") for row in table_rows(path.read_text("utf-8"))}
    text = re.sub("<!-- table: .*?<!-- /table -->", "", PAPER_PAGE.read_text("utf-8"), flags=re.DOTALL)
    told = table_rows(text)
    assert len(told) > 10
    assert [row for row in told if row not in known] == []


def test_every_p_value_is_of_a_verdict() -> None:
    verdicts = "".join(path.read_text("utf-8") for path in ROOT.glob("results/**/verdict.json"))
    told = re.findall(r"p = [0-9.]+(?:e-[0-9]+)?", PAPER_PAGE.read_text("utf-8"))
    assert told
    assert [value for value in told if value.rstrip(".") not in verdicts] == []


@pytest.mark.parametrize("study", STUDIES)
def test_records_name_their_data_and_no_machine(study: str) -> None:
    """Those of a study are all of the same text."""
    text = study.partition("/")[0] if study in (*MIX, *SIZES) else "nano"
    data = json.loads((ROOT / "results" / text / "data.json").read_text("utf-8"))
    runs = [Run.open(folder) for folder in run_folders(ROOT / "results" / study)]
    assert runs
    for run in runs:
        assert run.environment["data"]["fingerprint"] == data["fingerprint"]
        assert not {"host", "folder", "command"} & run.environment.keys()
        assert "/" not in run.config["data"]


@pytest.mark.parametrize("study", STUDIES)
def test_what_is_kept_of_kept_runs_is_all_of_it(study: str, tmp_path: Path) -> None:
    """A few of each: all of them take two minutes."""
    runs = [Run.open(folder) for folder in run_folders(ROOT / "results" / study)[:3]]
    archive.add(tmp_path / "runs.parquet", map(excerpt, runs))
    for run in runs:
        again = Run.open(tmp_path / run.name)
        assert (again.config, again.environment) == (run.config, run.environment)
        assert repr(list(again.lines())) == repr(list(run.lines()))


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("results/nano/*/table.md")))
def test_tables_of_entries_are_made_again(name: str) -> None:
    folder = ROOT / "results" / "nano"
    corpus = recall(folder)
    assert corpus is not None
    entry = ENTRIES[name]
    seeds = 3 if name in ("horizon", "warmup") else None  # as docs/paper-results.md has it
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
