"""`merit show`: records of runs as text."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_runs import write_run

from merit_lab.results import command as report_command
from merit_lab.results.show_command import main
from merit_lab.runs import Run, archive, excerpt

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


def run_show(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def lines(capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_show(capsys, *arguments).splitlines()]


def test_runs_are_listed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, _, *rows = [line.split() for line in run_show(capsys, study).splitlines()]  # a head and a rule
    listed = [(name, status, step) for name, status, step, _ in rows]
    assert listed == [
        ("adamw-lr0.01-seed0", "diverged", "50"),
        ("lamb-lr0.01-seed0", "interrupted", "100"),
        (NAME, "finished", "100"),
    ]
    assert rows[0][-1] == "nan"
    assert float(rows[2][-1]) == pytest.approx(2.3, abs=0.1)


def test_a_run_is_printed_line_by_line(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, environment, *measured = lines(capsys, study, NAME)
    run = Run.open(study / NAME)
    assert config == {"run": NAME, "kind": "config", **run.config}
    assert environment == {"run": NAME, "kind": "environment", **run.environment}
    assert measured == [{"run": NAME, **line} for line in run.lines()]


def test_only_lines_of_one_kind(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = lines(capsys, study, NAME, "--kind", "validation")
    assert {line["kind"] for line in printed} == {"validation"}
    configs = lines(capsys, study, "--kind", "config")
    assert [line["run"] for line in configs] == ["adamw-lr0.01-seed0", "lamb-lr0.01-seed0", NAME]


def test_nan_is_written_as_in_the_metrics(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, study, "adamw-lr0.01-seed0", "--kind", "train")[-1]["loss"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merit-lr0.01-seed1"], f"holds no run 'merit-lr0.01-seed1'; did you mean {NAME!r}? `merit show"),
        (["--kind", "loss"], "no lines of kind 'loss'; there are attention, config"),
    ],
)
def test_a_missing_run_or_kind_is_named(
    study: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(study), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("command", [main, report_command.main])
def test_runs_below_a_folder_of_runs_are_named(command, tmp_path: Path, capsys) -> None:
    """`merit train` writes into runs/, `merit compare` into runs/compare-tiny."""
    folder = tmp_path / "runs"
    write_run(folder, "merit")
    write_run(folder / "compare-tiny", "adamw")
    out = [] if command is main else ["--out", str(tmp_path / "report")]
    assert command([str(folder), *out]) == 0
    assert f"those in {folder / 'compare-tiny'} are left out" in capsys.readouterr().err
    assert command([str(folder / "compare-tiny"), *out]) == 0
    assert "left out" not in capsys.readouterr().err
