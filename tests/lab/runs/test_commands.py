"""`merit runs` and `merit keep`."""

import json
import math
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from written_runs import write_run

from merit_lab.runs import keep_command, table
from merit_lab.runs.command import main


def run(command, *arguments: object) -> int:
    return command([str(argument) for argument in arguments])


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", end="diverged", steps=4)
    write_run(tmp_path / "below" / "three")
    assert run(main, tmp_path) == 0
    output = capsys.readouterr()
    rows = [line.split() for line in output.out.splitlines()[-2:]]
    assert rows == [["one", "finished", "8", "3.069"], ["two", "diverged", "4", "3.264"]]
    assert f"those in {tmp_path / 'below'} are left out" in output.err


def test_the_frames_are_written(tmp_path: Path) -> None:
    one = write_run(tmp_path / "study" / "one")
    with one.metrics_path.open("a") as file:
        file.write('{"kind": "validation", "step": 9, "loss": "nan"}\n')
    out = tmp_path / "out"
    assert run(main, tmp_path / "study", "--csv", out, "--json", out, "--parquet", out) == 0
    read = table.read(tmp_path / "study")
    for name, frame in read._asdict().items():
        assert_frame_equal(pl.read_parquet(out / f"{name}.parquet"), frame)
        scalars = [column for column, kind in frame.schema.items() if not kind.is_nested()]
        written = pl.read_csv(out / f"{name}.csv", schema_overrides=frame.select(scalars).schema)
        assert_frame_equal(written.select(scalars), frame.select(scalars), check_exact=True)
        lines = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        assert [line["run"] for line in lines] == frame["run"].to_list()
    assert lines[-1]["validation_loss"] == "nan"
    assert math.isnan(written["validation_loss"][-1])
    assert json.loads(written["max_logits"][0]) == read.steps["max_logits"][0].to_list()
    assert run(main, tmp_path / "study", "--parquet", out) == 0, "again"


def test_tables_are_not_written_among_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one")
    assert run(keep_command.main, tmp_path, "--out", tmp_path / "kept") == 0
    for folder in (tmp_path, tmp_path / "kept"):
        assert run(main, tmp_path, "--parquet", folder) == 1
        assert "holds runs itself; choose another folder" in capsys.readouterr().err


def test_only_runs_that_are_over_are_kept_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, end in (("a", "finished"), ("b", "diverged"), ("c", "interrupted"), ("d", None)):
        write_run(tmp_path / "runs" / name, end=end)
    kept = tmp_path / "kept"
    for new, there in ((2, 0), (0, 2)):
        assert run(keep_command.main, tmp_path / "runs", "--out", kept) == 0
        output = capsys.readouterr()
        assert f"{new} written to {kept / 'runs.parquet'}, {there} there already, 2 left out" in output.out
        assert "c is interrupted and is left out" in output.err
    assert table.read(kept).runs["run"].to_list() == ["a", "b"]


@pytest.mark.parametrize(
    ("changed", "what"), [({"steps": 6}, "settings"), ({"seed": 1}, "settings"), ({"started": "x"}, "times")]
)
def test_another_run_of_the_same_name_is_refused(
    tmp_path: Path, changed: dict[str, object], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a" / "one")
    other = write_run(
        tmp_path / "b" / "one", **{key: one for key, one in changed.items() if key != "started"}
    )
    if "started" in changed:
        path = other.folder / "environment.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert run(keep_command.main, tmp_path / "a", tmp_path / "b", "--out", tmp_path / "kept") == 1
    assert f"of the same name with different {what}" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()
