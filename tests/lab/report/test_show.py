"""What runs recorded, as text."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run

from merit_lab.record import Run, archive, excerpt
from merit_lab.report.show_command import main

NAME = "merit-lr0.01-seed0"


@pytest.fixture(params=["directories", "file"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Three runs, in directories or kept in a file."""
    runs = [
        Run.open(write_run(tmp_path / "runs", "merit", data="enwik8")),
        Run.open(write_run(tmp_path / "runs", "lamb", data="enwik8", end="interrupted")),
        Run.open(write_run(tmp_path / "runs", "adamw", data="enwik8", diverges_at=50)),
    ]
    if request.param == "directories":
        return tmp_path / "runs"
    archive.add(tmp_path / "study" / "runs.parquet", map(excerpt, runs))
    return tmp_path / "study"


def shown(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert main([str(own) for own in arguments]) == 0
    return capsys.readouterr().out


def lines(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(capsys, *arguments).splitlines()]


def test_runs_are_listed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, *rows = [line.split() for line in shown(capsys, study).splitlines()]  # a head and a rule
    found = [(name, status, step) for name, status, step, _ in rows]
    assert found == [
        ("adamw-lr0.01-seed0", "diverged", "50"),
        ("lamb-lr0.01-seed0", "interrupted", "100"),
        (NAME, "finished", "100"),
    ]
    assert rows[0][-1] == "nan"
    assert float(rows[2][-1]) == pytest.approx(2.3, abs=0.1)


def test_a_run_is_printed_as_its_lines(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, environment, *measured = lines(capsys, study, NAME)
    run = Run.open(study / NAME)
    assert config == {"run": NAME, "kind": "config", **run.config}
    assert environment == {"run": NAME, "kind": "environment", **run.environment}
    assert measured == [{"run": NAME, **line} for line in run.lines()]


def test_lines_of_a_kind_alone(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(capsys, study, NAME, "--kind", "validation")
    assert {line["kind"] for line in found} == {"validation"}
    everyone = lines(capsys, study, "--kind", "config")
    assert [line["run"] for line in everyone] == ["adamw-lr0.01-seed0", "lamb-lr0.01-seed0", NAME]


def test_nan_is_written_as_in_the_metrics(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, study, "adamw-lr0.01-seed0", "--kind", "train")[-1]["loss"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["merit-lr0.01-seed1"], f"holds no run 'merit-lr0.01-seed1'; did you mean {NAME}? `merit show"),
        (["--kind", "loss"], "no lines of kind 'loss'; there are attention, config"),
    ],
)
def test_what_is_not_there_is_named(
    study: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study), *arguments]) == 1
    assert told in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
