"""`merit reproduce`: what it runs, shares, resumes and refuses."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_scale import make_scale

from merit_lab.data import Dataset
from merit_lab.paper import command, records
from merit_lab.paper.entries.losses import FIVE
from merit_lab.paper.registry import ENTRIES, choose
from merit_lab.paper.scales import SCALES
from merit_lab.paper.setups import Scale
from merit_lab.paper.work import Task, reproduce
from merit_lab.results.keep_command import main as keep
from merit_lab.runs import Run
from merit_lab.study import runner
from merit_lab.train import Interrupted
from merit_lab.train.parallel import Ranks


@pytest.fixture(autouse=True)
def _toy_for_tiny(monkeypatch: pytest.MonkeyPatch, toy: Scale) -> None:
    monkeypatch.setitem(SCALES, "tiny", toy)


def count_runs(folder: Path) -> int:
    return len(list((folder / "runs").glob("*/config.json")))


def test_entries_share_runs_and_a_second_call_trains_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig13", "fig15", "--data", str(data), "--out", str(tmp_path), "--jobs", "1"]
    assert command.main(arguments) == 0
    assert count_runs(tmp_path) == 2  # two seeds of MERIT, once
    output = capsys.readouterr().out
    assert f"The page: {tmp_path / 'index.html'}" in output
    assert "fig13" in output
    before = (tmp_path / "fig13" / "verdict.json").read_bytes()
    (tmp_path / "fig13" / "of-another-version.svg").write_text("<svg/>")

    def train(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(runner, "train", train)
    assert command.main(arguments) == 0
    assert (tmp_path / "fig13" / "verdict.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "fig13").glob("*.svg")] == ["clipped.svg"]


def test_a_run_of_a_later_entry_that_cannot_be_trained_is_refused_first(
    data: Path,
    toy: Scale,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup = replace(toy.horizon, model=replace(toy.horizon.model, context=20_000))
    monkeypatch.setitem(SCALES, "tiny", replace(toy, horizon=setup))
    assert command.main(["fig13", "horizon", "--data", str(data), "--out", str(tmp_path)]) == 1
    assert "cannot be trained: " in (error := capsys.readouterr().err)
    assert "use a shorter context" in error
    assert count_runs(tmp_path) == 0


@pytest.mark.parametrize(("num_ranks", "device", "jobs"), [(1, "cpu", 4), (2, "cpu", 1), (1, "cuda", 1)])
def test_runs_are_trained_side_by_side_on_the_cores_of_one_rank(
    num_ranks: int, device: str, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(command.Ranks, "join", lambda: Ranks(0, num_ranks, torch.device(device)))
    assert command._default_jobs() == jobs


def test_kept_runs_give_the_same_tables_without_data_or_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, kept = tmp_path / "whole", tmp_path / "kept"
    assert command.main(["fig4", "--data", str(data), "--out", str(whole), "--jobs", "1"]) == 0
    assert keep([str(whole / "runs"), "--out", str(kept)]) == 0
    arguments = ["fig4", "--no-training", "--out", str(kept)]
    assert command.main(arguments) == 1
    assert f"the data of the runs in {kept} are not known" in capsys.readouterr().err
    shutil.copy(whole / "data.json", kept)
    assert command.main(arguments) == 0
    assert (kept / "fig4" / "table.md").read_text() == (whole / "fig4" / "table.md").read_text()

    shutil.rmtree(next((whole / "runs").glob("*-merit-*-seed0-*")))
    (kept / "runs.parquet").unlink()
    assert keep([str(whole / "runs"), "--out", str(kept)]) == 0
    assert command.main(arguments) == 0
    assert not (kept / "runs").exists()
    assert "1 missing, 1 finished" in (kept / "fig4" / "table.md").read_text()
    (kept / "data.json").write_text("{}")
    assert command.main(arguments) == 1
    assert "data.json is damaged" in capsys.readouterr().err


def test_data_other_than_those_of_the_folder_are_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert command.main(["fig13", "--data", str(data), "--out", str(out), "--jobs", "1"]) == 0
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other.mkdir()
    for file in ("train.bin", "val.bin"):
        (other / file).write_bytes((data / file).read_bytes()[:-2])
    capsys.readouterr()
    arguments = ["fig13", "--out", str(out), "--jobs", "1", "--data"]
    for mode in ("--no-training", "--yes"):
        assert command.main([mode, *arguments, str(other)]) == 1
        error = capsys.readouterr().err
        for fingerprint in (Dataset.open(other).fingerprint, Dataset.open(data).fingerprint):
            assert fingerprint in error
        assert "another folder with --out" in error
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept

    arguments.insert(0, "--no-training")
    assert command.main([*arguments, str(data)]) == 0
    (out / "data.json").unlink()
    assert command.main([*arguments, str(data)]) == 0
    assert not (out / "data.json").exists()  # it is written only when runs are trained


def test_a_folder_with_entries_of_another_scale_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig13", "--data", str(data), "--out", str(tmp_path), "--jobs", "1"]
    assert command.main(arguments) == 0
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setitem(SCALES, "nano", make_scale(name="other", steps=2))
    for mode in ("--no-training", "--yes"):
        assert command.main([mode, "--scale", "nano", *arguments]) == 1
        assert (
            "entries of scale toy, for example fig13, and cannot hold entries of scale other"
            in capsys.readouterr().err
        )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_verdict_is_named_with_the_way_out(
    content: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "fig4" / "verdict.json"
    damaged.parent.mkdir()
    damaged.write_text(content)
    assert command.main(["fig13", "--data", str(data), "--out", str(tmp_path), "--jobs", "1"]) == 1
    error = capsys.readouterr().err
    assert f"{damaged} is damaged" in error
    assert "remove it and make fig4 again" in error


def test_an_interrupted_call_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fig13", "--data", str(data), "--out", str(tmp_path), "--jobs", "1"]
    trained = runner.train
    calls = []

    def train(*args: Any, **options: Any) -> Run:
        calls.append(args)
        if len(calls) == 2:
            raise Interrupted(signal.SIGTERM, "stopped by SIGTERM after step 2, with a checkpoint")
        return trained(*args, **options)

    monkeypatch.setattr(runner, "train", train)
    assert command.main(arguments) == 128 + signal.SIGTERM
    assert "Run the same command again to continue." in capsys.readouterr().err
    assert not (tmp_path / "fig13").exists()
    assert command.main(arguments) == 0
    assert len(calls) == 3  # of the two runs, one was done
    assert json.loads((tmp_path / "fig13" / "verdict.json").read_text())["outcome"] != "not run"


def test_runs_trained_in_parallel_give_the_same_verdicts_and_are_measured_with_one_thread(
    dataset: Dataset, tmp_path: Path, toy: Scale
) -> None:
    threads: list[int] = []
    entry = replace(ENTRIES["fig13"], measure=lambda *_: threads.append(torch.get_num_threads()))
    one, two = (
        Task(entries=[entry], scale=toy, corpus=dataset, folder=tmp_path / str(jobs), jobs=jobs)
        for jobs in (1, 2)
    )
    verdicts = reproduce(one)
    threads.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert reproduce(two) == verdicts
        assert reproduce(two) == verdicts  # there is nothing left to train
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 1, 2, 2]
    assert len(list((tmp_path / "2" / "logs").iterdir())) == 2


def test_a_run_that_diverged_is_shown_and_not_repeated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = make_scale(seeds=1)
    scale.gpt2[0].rates["adamw"] = 1e30  # type: ignore[index]
    monkeypatch.setitem(SCALES, "tiny", scale)
    arguments = ["fig2", "--data", str(data), "--out", str(tmp_path), "--jobs", "1"]
    assert command.main(arguments) == 0
    verdict = json.loads((tmp_path / "fig2" / "verdict.json").read_text())
    assert len(verdict["trouble"]) == 1
    pattern = r"gpt2-3x16-adamw-lr1e\+30-batch8-seed0-\w{8}: diverged: the validation loss is"
    assert re.match(pattern, verdict["trouble"][0])
    page = (tmp_path / "fig2" / "index.html").read_text()
    assert "Runs that did not finish" in page
    assert "1 diverged" in page
    assert command.main(arguments) == 0
    assert verdict == json.loads((tmp_path / "fig2" / "verdict.json").read_text())


def test_other_data_or_settings_make_another_run(dataset: Dataset, tmp_path: Path, toy: Scale) -> None:
    trial = toy.trial(toy.gpt2[0], "merit", 0)

    def name(trial: Any, data: Dataset = dataset) -> str:
        ((_, planned),) = records.plan([trial], tmp_path, data)
        return planned.folder.name

    assert name(trial).startswith("gpt2-3x16-merit-lr0.01-batch8-seed0-")
    assert name(trial) == name(toy.trial(toy.gpt2[0], "merit", 0))
    others = [
        toy.trial(toy.gpt2[0], "merit", 0, without=("clip",)),
        toy.trial(toy.gpt2[0], "merit", 0, qk_norm=True),
        toy.trial(toy.gpt2[0], "merit", 0, lr=0.02),
        make_scale(steps=5).trial(make_scale(steps=5).gpt2[0], "merit", 0),
    ]
    assert len({name(trial), *map(name, others)}) == 5
    folder = tmp_path / "other"
    folder.mkdir()
    for file in ("train.bin", "val.bin"):
        (folder / file).write_bytes((dataset.folder / file).read_bytes()[:-2])
    assert name(trial, Dataset.open(folder)) != name(trial)


@pytest.mark.parametrize("name", list(SCALES))
def test_every_scale_has_a_plan_for_every_entry(name: str) -> None:
    scale = SCALES[name]
    for entry in ENTRIES.values():
        trials = entry.trials(scale, 2)
        assert bool(trials) == (entry.name != "theorem1")
        assert {trial.config.seed for trial in trials} <= {0, 1}


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_doubled_setups_match_the_first_gpt2_setups(scale: Scale) -> None:
    for single, doubled in zip(scale.gpt2, scale.doubled, strict=False):
        assert (doubled.batch, doubled.tokens) == (2 * single.batch, single.tokens)
        assert doubled.model == single.model
        assert doubled.name == f"{single.model_name}, batch {doubled.batch}"
        for name in FIVE:  # so that the middle of the grid is the setup's rate
            assert doubled.rates[name] == float(f"{doubled.rates[name]:.3g}")


def test_the_paper_scale_has_the_settings_of_the_paper() -> None:
    scale = SCALES["paper"]
    runs = {(trial.panel, trial.series): trial.config for trial in ENTRIES["fig4"].trials(scale, 1)}
    large = runs["GPT-2 large, batch 8K", "MERIT"]
    assert (large.batch, large.optimizer.lr, large.model.layers) == (8192, 6e-3, 36)
    assert large.steps == -(-16 * 10**9 // (8192 * 1024))
    assert runs["GPT-2 medium, batch 4K", "AdamW"].optimizer.lr == 4e-3
    assert runs["GPT-2 small, batch 1K", "Lion"].optimizer.lr == 1e-4


def test_invalid_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fig44"]) == 1
    assert "unknown entry 'fig44'; did you mean 'fig4'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([])
    assert "give names of entries" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["fig4", "--seeds", "0"])
    assert "0 is too few" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["fig4", "--seeds", "three"])
    assert "'three' is not a whole number" in capsys.readouterr().err


def test_entries_come_in_the_order_of_the_paper() -> None:
    assert [entry.name for entry in choose(["table1", "fig11", "fig2"])] == ["fig2", "fig11", "table1"]
    assert choose(["all"]) == list(ENTRIES.values())
    assert len(ENTRIES) == 30
