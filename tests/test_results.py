"""docs/results.md says nothing that the records under results/ do not."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"


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


@pytest.mark.parametrize("folder", ["nano/runs", "nano/repeats", "gpt2-small/runs"])
def test_records_name_their_data_and_no_machine(folder: str) -> None:
    """All are of the same text."""
    data = json.loads((ROOT / "results/nano/data.json").read_text("utf-8"))
    paths = ROOT.glob(f"results/{folder}/*/environment.json")
    environments = [json.loads(path.read_text("utf-8")) for path in paths]
    assert environments
    for own in environments:
        assert own["data"]["fingerprint"] == data["fingerprint"]
        assert not {"host", "folder", "command"} & own.keys()


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
