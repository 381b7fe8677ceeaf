"""The pages with results say nothing that the records under results/ do not."""

import json
import sys
from pathlib import Path

import pytest

from merit_lab.runs import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "scripts"))
import evidence  # noqa: E402  # scripts of the documentation

DIRECTIONS = sorted(f"directions/{folder.name}" for folder in (ROOT / "results/directions").iterdir())
MIX = sorted(f"mix/{folder.name}" for folder in (ROOT / "results/mix").iterdir() if folder.is_dir())
SIZES = sorted(f"sizes/{folder.name}" for folder in (ROOT / "results/sizes").iterdir() if folder.is_dir())
ARENAS = sorted(f"arena/{folder.name}" for folder in (ROOT / "results/arena").iterdir())
STUDIES = ["nano", "nano/repeats", "gpt2-small", *DIRECTIONS, *MIX, *SIZES, *ARENAS]


@pytest.mark.parametrize("page", evidence.PAGES)
def test_tables_are_those_of_the_records(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert "<!-- table: " in text
    assert evidence.with_tables(text) == text, "run python docs/scripts/evidence.py"


def test_every_table_of_the_records_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text("utf-8") for page in evidence.PAGES)
    assert [name for name in evidence.TABLES if f"<!-- table: {name} -->" not in text] == []


@pytest.mark.parametrize("study", STUDIES)
def test_records_name_their_data_and_no_machine(study: str) -> None:
    """Those of a study are all of the same text."""
    text = study.partition("/")[0] if study in (*MIX, *SIZES) else "nano"
    data = json.loads((ROOT / "results" / text / "data.json").read_text("utf-8"))
    runs = table.read(ROOT / "results" / study).runs
    assert set(runs["environment.data.fingerprint"]) == {data["fingerprint"]}
    assert not {"environment.host", "environment.folder", "environment.command"} & set(runs.columns)
    assert not runs["data"].str.contains("/").any()
