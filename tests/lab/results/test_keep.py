"""`merit keep`: files of runs, small enough to keep beside code."""

import json
import math
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fake_runs import write_run

from merit_lab.results.gather import find_runs
from merit_lab.results.keep_command import main
from merit_lab.runs import MetricsWriter, Run, excerpt
from merit_lab.runs.excerpt import Excerpt
from merit_lab.study.state import is_done


def keep(*arguments: Path | str) -> int:
    return main([str(argument) for argument in arguments])


def test_a_kept_run_reads_like_the_original(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", num_steps=400, every=4, data="/home/somebody/data/enwik8")
    assert keep(tmp_path / "runs", "--out", tmp_path / "kept") == 0
    before, kept = (Run.open(path) for path in (folder, tmp_path / "kept" / folder.name))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["runs.parquet"]

    assert kept.status == before.status == "finished"
    assert kept.config == {**before.config, "data": "enwik8"}
    assert kept.environment["versions"] == before.environment["versions"]
    for kind in ("validation", "attention", "event"):
        assert [row["step"] for row in kept.metrics(kind)] == [row["step"] for row in before.metrics(kind)]
    for ours, theirs in zip(kept.metrics("validation"), before.metrics("validation"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["loss"] == float(f"{ours['loss']:.5g}")
    assert len(before.metrics("update")) == 50
    assert [row["step"] for row in kept.metrics("update")] == [
        row["step"] for row in before.metrics("update")
    ]
    lines = [row["step"] for row in kept.lines()]
    assert lines == sorted(lines), "in the order of measurement"
    all_steps = [row["step"] for row in before.metrics("train")]
    steps = [row["step"] for row in kept.metrics("train")]
    assert len(set(steps)) == 50
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (all_steps[0], all_steps[-1])
    assert kept.environment["excerpt_of"] == {"digits": 5, "train": len(all_steps), "update": 50}


def test_evaluations_are_kept_beside_the_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    assert keep(tmp_path / "runs", "--out", tmp_path / "kept") == 0
    result = folder / "evaluate" / "step-00000040" / "lambada.json"
    result.parent.mkdir(parents=True)
    environment = {"folder": "/home/somebody", "data": {"folder": "/home/somebody/enwik8"}}
    result.write_text(json.dumps({"acc": 0.25, "environment": environment}))  # evaluated after it was kept
    assert keep(tmp_path / "runs", "--out", tmp_path / "kept") == 0
    copy = tmp_path / "kept" / "evaluate" / folder.name / "step-00000040" / "lambada.json"
    assert json.loads(copy.read_text()) == {"acc": 0.25, "environment": {"data": {"folder": "enwik8"}}}
    assert keep(tmp_path / "kept", "--out", tmp_path / "again") == 0
    again = tmp_path / "again" / copy.relative_to(tmp_path / "kept")
    assert again.read_text() == copy.read_text()
    assert keep("--remove", folder.name, "--out", tmp_path / "kept") == 0
    assert not copy.parent.parent.exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_file_that_is_no_evaluation_is_refused_by_its_name(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    (folder / "evaluate").mkdir()
    (folder / "evaluate" / "notes.json").write_text(content)
    assert keep(tmp_path / "runs", "--out", tmp_path / "kept") == 1
    assert "notes.json is not a result of `merit evaluate`" in capsys.readouterr().err
    assert not (tmp_path / "kept" / "evaluate").exists()


def finish(folder: Path) -> None:
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write({"kind": "event", "step": 0, "what": "finished", "message": ""})


def run_of(folder: Path, *, num_train: int = 0, num_update: int = 0, slow_every: int = 1) -> Run:
    """A run in which every ``slow_every``-th step, starting with the first, took ten times as long."""
    run = Run.create(folder, {"data": "enwik8"}, {})
    with MetricsWriter(run.metrics_path) as metrics:
        for place in range(num_train):
            speed = 100.0 if place % slow_every == 0 else 1000.0
            metrics.write({"kind": "train", "step": place + 1, "tokens_per_second": speed})
        for place in range(num_update):
            metrics.write({"kind": "update", "step": place + 1, "parameters": {"weight": {"clipped": 0.5}}})
    return run


def test_a_record_that_names_no_data_is_kept_as_it_is(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {"seed": 1}, {})
    assert excerpt(run).config == {"seed": 1}


@pytest.mark.parametrize("slow_every", [3, 5, 10, 40])
def test_omitted_lines_do_not_change_the_median_speed(tmp_path: Path, slow_every: int) -> None:
    # With this many lines, an even stride would be slow_every.
    run = run_of(tmp_path / "run", num_train=49 * slow_every + 1, slow_every=slow_every)
    speeds = [row["tokens_per_second"] for row in excerpt(run).lines]
    assert statistics.median(speeds) == 1000.0
    assert speeds.count(100.0) / 50 == pytest.approx(1 / slow_every, abs=0.14)


def test_kept_lines_are_spread_over_the_run_and_equal_for_runs_of_one_length(
    tmp_path: Path,
) -> None:
    def kept_steps(name: str) -> list[int]:
        return [row["step"] for row in excerpt(run_of(tmp_path / name, num_train=1000)).lines]

    steps = kept_steps("one")
    assert steps == kept_steps("other"), "a mean over seeds is taken at common steps"
    for begin in range(1, 1000, 50):
        assert any(begin <= step < begin + 50 for step in steps)


@pytest.mark.parametrize(("num_update", "num_kept"), [(63, 63), (64, 64), (65, 64), (500, 64)])
def test_updates_are_left_out_beyond_64(tmp_path: Path, num_update: int, num_kept: int) -> None:
    kept = excerpt(run_of(tmp_path / "run", num_update=num_update))
    steps = [row["step"] for row in kept.lines]
    assert len(set(steps)) == num_kept
    assert (steps[0], steps[-1]) == (1, num_update)
    assert kept.environment["excerpt_of"]["update"] == num_update


def write_old_format(kept: Excerpt, parent: Path) -> Path:
    """Write a kept run as a directory, as was done before there were files of runs."""
    run = Run.create(parent / kept.name, kept.config, kept.environment)
    with MetricsWriter(run.metrics_path) as metrics:
        for line in kept.lines:
            metrics.write(line)
    return run.folder


def test_runs_kept_in_directories_are_copied_to_the_file_unchanged(tmp_path: Path) -> None:
    once = excerpt(run_of(tmp_path / "run", num_train=300, num_update=300))
    folder = write_old_format(once, tmp_path / "study" / "runs")
    finish(folder)
    old = Run.open(folder)
    assert keep(tmp_path / "study" / "runs", "--out", tmp_path / "study") == 0
    new = Run.open(tmp_path / "study" / "runs.parquet" / "run")
    assert new.is_kept
    assert not old.is_kept
    assert (new.config, new.environment) == (old.config, old.environment)
    assert new.environment["excerpt_of"]["train"] == 300
    assert list(new.lines()) == list(old.lines())


def test_nothing_of_the_machine_is_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="/home/somebody/data/enwik8")
    assert keep(folder, "--out", tmp_path / "kept") == 0
    kept = Run.open(tmp_path / "kept" / folder.name)
    text = json.dumps([kept.config, kept.environment, *kept.lines()])
    assert "somebody" not in text
    assert "a-private-name" not in text


def test_runs_that_are_over_are_kept_and_unfinished_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    write_run(runs, "adamw", diverges_at=50, data="enwik8")
    write_run(runs, "lamb", end="abandoned", data="enwik8")
    killed = write_run(runs, "merit", end=None, data="enwik8")
    assert keep(runs, "--out", kept) == 0
    output = capsys.readouterr()
    assert "2 written" in output.out
    assert "1 left out" in output.out
    assert f"{killed} is unfinished" in output.err
    run, abandoned = find_runs([kept])
    assert (run.status, abandoned.status) == ("diverged", "abandoned")
    assert math.isnan(run.rows["train"][-1]["loss"])

    assert keep(runs, "--out", kept) == 0
    assert "0 written" in (again := capsys.readouterr().out)
    assert "2 there already" in again


def test_a_run_killed_after_its_last_validation_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    *measurements, end = (folder / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    assert "finished" in end
    (folder / "metrics.jsonl").write_text("".join(measurements), "utf-8")
    assert Run.open(folder).status == "unfinished"  # its last weights are missing, so it can be resumed
    assert keep(folder, "--out", tmp_path / "kept") == 0
    assert "1 written" in capsys.readouterr().out
    (run,) = find_runs([tmp_path / "kept"])
    assert run.status == "finished"
    assert is_done(tmp_path / "kept" / folder.name)  # so that no study resumes it


def test_another_run_with_the_name_of_a_kept_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, batch in (("one", 8), ("other", 16)):
        write_run(tmp_path / place, "merit", data="enwik8", batch=batch)
    assert keep(tmp_path / "one", "--out", tmp_path / "kept") == 0
    assert keep(tmp_path / "other", "--out", tmp_path / "kept") == 1
    assert "are different runs with the same name" in capsys.readouterr().err


def test_a_run_that_was_trained_again_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    environment = json.loads((folder / "environment.json").read_text())
    for day, status in ((1, 0), (2, 1)):
        restarted = {**environment, "started": f"2026-01-0{day}T00:00:00+00:00"}
        (folder / "environment.json").write_text(json.dumps(restarted))
        assert keep(folder, "--out", tmp_path / "kept") == status
    assert "are different runs with the same name" in (error := capsys.readouterr().err)
    assert "started at 2026-01-01T00:00:00+00:00 and 2026-01-02T00:00:00+00:00" in error


def test_adding_runs_leaves_the_kept_ones_unchanged(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = write_run(tmp_path / "one", "merit", data="enwik8")
    assert keep(first, "--out", kept) == 0
    before = list(Run.open(kept / first.name).lines())
    for seed in (1, 2):
        write_run(tmp_path / "two", "adamw", seed=seed, data="enwik8")
    assert keep(tmp_path / "one", tmp_path / "two", "--out", kept) == 0
    assert list(Run.open(kept / first.name).lines()) == before
    assert len(find_runs([kept])) == 3


def test_two_runs_of_the_same_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, batch in (("one", 8), ("other", 16)):
        write_run(tmp_path / place, "merit", data="enwik8", batch=batch)
    assert keep(tmp_path / "one", tmp_path / "other", "--out", tmp_path / "kept") == 1
    assert "are different runs with the same name" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_a_failed_write_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    one, two = (write_run(tmp_path / "runs", "merit", seed=seed, data="enwik8") for seed in (0, 1))
    assert keep(one, "--out", tmp_path / "kept") == 0
    before = (tmp_path / "kept" / "runs.parquet").read_bytes()
    monkeypatch.setattr("os.fsync", full)
    assert keep(two, "--out", tmp_path / "kept") == 1
    assert "no space left" in capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [before]


def test_kept_runs_can_be_copied_to_another_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", "merit", data="enwik8")
    assert keep(folder, "--out", tmp_path / "one") == 0
    assert keep(tmp_path / "one" / "runs.parquet", "--out", tmp_path / "two") == 0
    one, two = (Run.open(tmp_path / place / folder.name) for place in ("one", "two"))
    assert list(one.lines()) == list(two.lines())
    assert one.environment == two.environment


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keep(tmp_path, "--out", tmp_path / "kept") == 1
    assert "holds no run" in capsys.readouterr().err


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """The directories of three runs that are also kept."""
    folders = [write_run(tmp_path / "runs", "merit", seed=seed, data=f"data-{seed}") for seed in range(3)]
    assert keep(*folders, "--out", tmp_path / "kept") == 0
    return folders


def test_removing_a_run_leaves_the_others_unchanged(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    one, two, other = (run.name for run in three)
    before = {name: list(Run.open(kept / name).lines()) for name in (one, other)}
    assert keep("--remove", two, "--out", kept) == 0
    assert "1 removed from" in (output := capsys.readouterr().out)
    assert "2 left" in output
    assert {name: list(Run.open(kept / name).lines()) for name in (one, other)} == before
    assert Run.open(kept / other).config["data"] == "data-2"
    with pytest.raises(FileNotFoundError):
        Run.open(kept / two)
    strings = pq.read_table(kept / "runs.parquet")["json"].chunk(0).dictionary.to_pylist()
    assert '"data-0"' in strings
    assert '"data-1"' not in strings, "nothing is left of it"
    assert keep(three[1], "--out", kept) == 0  # it can be kept again
    assert len(find_runs([kept])) == 3

    assert keep("--remove", one, two, other, "--out", kept) == 0
    assert "none left, so the file was deleted" in capsys.readouterr().out
    assert list(kept.iterdir()) == []


@pytest.mark.usefixtures("three")
def test_an_unknown_name_removes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tmp_path / "kept" / "runs.parquet").read_bytes()
    names = [run.name for run in find_runs([tmp_path / "kept"])]
    assert keep("--remove", names[0], f"{names[1]}x", "--out", tmp_path / "kept") == 1
    assert f"keeps no run '{names[1]}x'; did you mean '{names[1]}'?" in capsys.readouterr().err
    assert (tmp_path / "kept" / "runs.parquet").read_bytes() == before
    assert keep("--remove", "one", "--out", tmp_path / "elsewhere") == 1
    assert "so no run is kept in it" in capsys.readouterr().err


def test_a_failed_removal_leaves_the_file_unchanged(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    before = (tmp_path / "kept" / "runs.parquet").read_bytes()
    monkeypatch.setattr("os.fsync", full)
    assert keep("--remove", three[0].name, "--out", tmp_path / "kept") == 1
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [before]


@pytest.mark.parametrize("arguments", [["--out", "kept"], ["run", "--remove", "run", "--out", "kept"]])
def test_runs_and_remove_exclude_each_other(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "give the runs to keep, or with --remove" in capsys.readouterr().err
