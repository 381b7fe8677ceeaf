"""`merit reproduce` at scale tiny, as a user runs it, but with one seed."""

import json
from pathlib import Path
from typing import Any

import pytest

from merit_lab.paper import command
from merit_lab.paper.registry import ENTRIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EVALUATIONS = ("fig5", "fig12", "table1")
ARGUMENTS = ["--scale", "tiny", "--seeds", "1", "--out", "out"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def read_verdict(name: str) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads(Path("out", name, "verdict.json").read_text())
    return verdict


def check_files(name: str) -> None:
    folder = Path("out", name)
    assert (folder / "index.html").stat().st_size > 100_000, "it holds the chart library"
    assert len((folder / "table.csv").read_text().splitlines()) > 1
    assert (folder / "table.md").exists()
    assert (folder / "runs.csv").exists()
    pictures = list(folder.glob("*.svg"))
    assert pictures
    assert all("</svg>" in picture.read_text() for picture in pictures)


def metrics() -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in Path("out", "runs").glob("*/metrics.jsonl")}


def test_all_entries_and_a_second_call_that_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["all", *ARGUMENTS]) == 0
    for name in ENTRIES:
        verdict = read_verdict(name)
        if name in EVALUATIONS:
            assert verdict["outcome"] == "not run"
            assert "--task-files" in verdict["missing"]
        else:
            # Training uses one seed. The theorem has separate seeds, and best rates outside their grids may
            # leave nothing to compare.
            assert verdict["outcome"] == "no test" or name in ("theorem1", "table4", "llama-rates")
            assert verdict["trouble"] == [], name
            check_files(name)
    before = metrics()
    assert command.main(["all", *ARGUMENTS]) == 0
    assert metrics() == before
    capsys.readouterr()
    assert command.main(["--list", *ARGUMENTS]) == 0
    (together,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("together"))
    assert f" {len(before)} 0 " in " ".join(together.split())


@pytest.mark.usefixtures("offline")
def test_perplexities_on_the_real_sets(task_files: Path) -> None:
    assert command.main(["fig5", *ARGUMENTS, "--task-files", str(task_files)]) == 0
    verdict = read_verdict("fig5")
    assert [comparison["seeds"] for comparison in verdict["verdicts"][0]["comparisons"]] == [1] * 4
    check_files("fig5")
