"""Run directories small enough to be kept beside code."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from fake_runs import write_run

from merit_optim.lab.record import Run
from merit_optim.lab.report.gather import find_runs
from merit_optim.lab.report.keep_command import main


def keep(*arguments: Path | str) -> int:
    return main([str(own) for own in arguments])


def test_a_kept_run_reads_as_the_run_did(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", num_steps=400, every=2, data="/home/somebody/data/enwik8")
    assert keep(tmp_path / "runs", "--out", tmp_path / "kept") == 0
    before, kept = (Run.open(own) for own in (folder, tmp_path / "kept" / folder.name))

    assert kept.status == before.status == "finished"
    assert kept.config == {**before.config, "data": "enwik8"}
    assert kept.environment["versions"] == before.environment["versions"]
    for kind in ("validation", "attention", "event"):
        assert [row["step"] for row in kept.metrics(kind)] == [row["step"] for row in before.metrics(kind)]
    for ours, theirs in zip(kept.metrics("validation"), before.metrics("validation"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["loss"] == float(f"{ours['loss']:.5g}")
    for kind, most in (("train", 50), ("update", 8)):
        steps = [row["step"] for row in kept.metrics(kind)]
        all_steps = [row["step"] for row in before.metrics(kind)]
        assert len(steps) == len(set(steps)) == most
        assert (steps[0], steps[-1]) == (all_steps[0], all_steps[-1])
        gaps = [later - earlier for earlier, later in pairwise(steps)]
        assert max(gaps) - min(gaps) <= all_steps[1] - all_steps[0]
        assert kept.environment["excerpt_of"][kind] == len(all_steps)


def test_nothing_of_the_machine_is_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="/home/somebody/data/enwik8")
    assert keep(folder, "--out", tmp_path / "kept") == 0
    text = "".join(path.read_text() for path in (tmp_path / "kept" / folder.name).iterdir())
    assert "somebody" not in text
    assert "a-private-name" not in text


def test_a_run_that_diverged_is_kept_and_one_without_end_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    write_run(runs, "adamw", diverges_at=50, data="enwik8")
    killed = write_run(runs, "merit", end=None, data="enwik8")
    assert keep(runs, "--out", kept) == 0
    said = capsys.readouterr()
    assert "1 written" in said.out
    assert "1 left out" in said.out
    assert f"{killed} is unfinished" in said.err
    (run,) = find_runs([kept])
    assert run.status == "diverged"
    assert math.isnan(run.rows["train"][-1]["loss"])

    assert keep(runs, "--out", kept) == 0
    assert "0 written" in (again := capsys.readouterr().out)
    assert "1 there already" in again


def test_another_run_of_the_same_name_is_not_taken_for_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, batch in (("one", 8), ("other", 16)):
        write_run(tmp_path / place, "merit", data="enwik8", batch=batch)
    assert keep(tmp_path / "one", "--out", tmp_path / "kept") == 0
    assert keep(tmp_path / "other", "--out", tmp_path / "kept") == 1
    assert "is another run than" in capsys.readouterr().err


def test_one_that_was_stopped_is_written_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    kept = tmp_path / "kept" / folder.name
    kept.mkdir(parents=True)
    (kept / "metrics.jsonl").write_text('{"kind": "event", "step": 0, "what": "started", "message": ""}\n')
    assert keep(folder, "--out", tmp_path / "kept") == 0
    assert len(Run.open(kept).metrics("event")) == len(Run.open(folder).metrics("event"))


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keep(tmp_path, "--out", tmp_path / "kept") == 1
    assert "holds no run" in capsys.readouterr().err
