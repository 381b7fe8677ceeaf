"""`merit arena`: tuning, runs that are reused, and the leaderboard."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_arena
import pytest
from fake_arena import STEPS

from merit_lab.arena.board import Board, shared_a_gpu
from merit_lab.arena.runs import bars_of
from merit_lab.arena.summary import warnings
from merit_lab.arena.task import MOMENTUM, TuningTask
from merit_lab.data import Dataset
from merit_lab.results.gather import MeasuredRun
from merit_lab.runs import Run
from merit_lab.study import runner
from merit_lab.train import Bar, TrainConfig


def board(tmp_path: Path) -> list[dict]:
    return json.loads((tmp_path / "out" / "report" / "board.json").read_text())


def test_all_contestants_are_tuned_with_the_same_budget_and_ranked(arena, trained, tmp_path, capsys) -> None:
    assert arena("--budget", "8") == 0
    output, progress = capsys.readouterr()
    assert re.match(r"9 runs, .* here; then up to 21 more, at most about .* for all of them\n", progress)
    (leaderboard,) = board(tmp_path)
    assert [standing["optimizer"] for standing in leaderboard["standings"]] == ["muon-merit", "muon", "adamw"]
    assert {len(standing["tuning"]) for standing in leaderboard["standings"]} == {8}
    best = leaderboard["standings"][0]
    assert best["setting"]["optimizer.lr"] == 0.08
    assert best["setting"]["optimizer.options.rest_lr"] > 0.04  # it started at 0.4 of the rate
    assert len(best["losses"]) == 3
    assert "/" not in best["config"]["data"]  # a board can be passed on
    assert leaderboard["standings"][1]["chance"] < 0.01
    assert len(trained) == len(set(trained)) == 3 * (8 + 2)  # tuning runs, and two more seeds
    assert "With a batch of 4 MuonMERIT ends lowest, at a validation loss of" in output
    assert "it reaches Muon's final loss after" in output
    # The target is Muon's final loss, which it reaches at its last step; the loss falls linearly.
    steps = {standing["optimizer"]: standing["steps_to_target"] for standing in leaderboard["standings"]}
    assert 0.99 * STEPS < steps["muon"] <= STEPS
    assert steps["muon-merit"] < 0.95 * STEPS
    assert steps["adamw"] is None
    assert leaderboard["standings"][1]["seconds_to_target"] == pytest.approx(0.5 * steps["muon"])
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert (
        page.index("Standings, batch 4")
        < page.index("Tuning of the peak learning rate, batch 4")
        < page.index("Tuning of the learning rate of the rest, batch 4")
        < page.index("Best settings, batch 4")
    )
    assert "MuonMERIT" in (tmp_path / "out" / "report" / "table.md").read_text()
    # The settings of the runs, not those that were asked for, of which many follow from others.
    assert re.search(r"<dt>measure.validation_every</dt><dd>\d+</dd>", page)
    assert "<dt>optimizer.lr</dt>" not in page


def test_finished_runs_are_reused_and_a_larger_budget_continues(arena, trained, tmp_path) -> None:
    assert arena("--budget", "3", "--seeds", "0") == 0
    first = list(trained)
    (leaderboard,) = board(tmp_path)
    assert leaderboard["standings"][-1]["at_edge"]  # AdamW starts at a quarter of its best rate
    assert arena("--budget", "3", "--seeds", "0") == 0
    assert trained == first
    assert arena("--budget", "8", "--seeds", "0") == 0
    (leaderboard,) = board(tmp_path)
    assert leaderboard["standings"][-1]["setting"]["optimizer.lr"] == 4e-3
    assert "optimizer.lr" not in leaderboard["standings"][-1]["at_edge"]
    assert trained[: len(first)] == first


def test_the_momentum_is_tuned_and_named_in_the_results(arena, trained, tmp_path) -> None:
    assert arena("--budget", "11", "--seeds", "0", "--optimizers", "muon", "adamw") == 0
    (leaderboard,) = board(tmp_path)
    muon, adamw = leaderboard["standings"]
    assert muon["setting"][MOMENTUM] == 0.9
    assert "momentum=0.9" in muon["config"]["optimizer"]["options"]
    assert MOMENTUM not in adamw["setting"]
    assert any("-momentum0.9-" in folder.name for folder in trained)
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert page.count("momentum</th>") == 1


def test_an_arena_from_before_momenta_were_tuned_continues(arena, trained, monkeypatch) -> None:
    options = ["--budget", "11", "--seeds", "0", "--optimizers", "muon", "adamw"]
    with monkeypatch.context() as before:
        before.setattr(TuningTask, "default_momentum", None)
        assert arena(*options) == 0
    old = list(trained)
    assert not any("momentum" in folder.name for folder in old)
    assert arena(*options) == 0
    assert trained[: len(old)] == old
    new = [re.match(r"muon-.*-momentum([\d.]+)-", folder.name) for folder in trained[len(old) :]]
    assert [match and match[1] for match in new] == ["0.9", "0.975", "0.8"]


def test_an_arena_continues_after_an_interruption(arena, trained, monkeypatch, capsys) -> None:
    train, left = runner.train, [4]

    def stopped(config: TrainConfig, folder: Path, *, resume: bool, **more: Any) -> None:
        if not left[0]:
            Run.create(
                folder, config.to_dict(), {"data": {"fingerprint": Dataset.open(config.data).fingerprint}}
            )
            raise KeyboardInterrupt
        left[0] -= 1
        if resume:
            shutil.rmtree(folder)
        train(config, folder, resume=False, **more)

    monkeypatch.setattr(runner, "train", stopped)
    assert arena("--budget", "4", "--seeds", "0") == 130
    error = capsys.readouterr().err
    assert re.match("9 runs, .*; then up to 3 more, ", error)
    assert "Run the same command again to continue" in error
    left[0] = 100
    assert arena("--budget", "4", "--seeds", "0") == 0
    assert re.match("6 runs, .*; then up to 2 more, ", capsys.readouterr().err)
    assert len(trained) == len(set(trained)) == 12


def test_a_larger_batch_starts_at_the_best_settings_of_the_smaller(arena, trained, tmp_path) -> None:
    assert arena("--budget", "6", "--seeds", "0", "--batches", "4", "8") == 0
    small, large = board(tmp_path)
    rates = [standing["setting"]["optimizer.lr"] for standing in small["standings"]]
    assert [standing["setting"]["optimizer.lr"] for standing in large["standings"]] == rates
    steps = {Run.open(folder).config["batch"]: Run.open(folder).config["steps"] for folder in trained}
    assert steps == {4: STEPS, 8: STEPS // 2}  # the same number of tokens


def test_steps_and_rates_are_those_of_the_smallest_batch_unless_batch_is_one_of_them(arena, trained) -> None:
    assert arena("--budget", "3", "--seeds", "0", "--batches", "8", "16", "--lr", "adamw=0.01") == 0
    configs = [Run.open(folder).config for folder in trained]
    assert {config["batch"]: config["steps"] for config in configs} == {8: STEPS, 16: STEPS // 2}
    first = next(config for config in configs if config["optimizer"]["name"] == "adamw")
    assert (first["batch"], first["optimizer"]["lr"]) == (8, 0.01)


@pytest.mark.usefixtures("trained")
def test_diverged_runs_count_and_give_a_warning(arena, tmp_path, capsys) -> None:
    assert arena("--budget", "5", "--seeds", "0", "--lr", "adamw=0.05") == 0
    (leaderboard,) = board(tmp_path)
    assert leaderboard["standings"][-1]["optimizer"] == "adamw"
    table = (tmp_path / "out" / "report" / "table.md").read_text()
    assert "diverged" in table
    assert "has no worse neighbour on one side; use a larger --budget to" in capsys.readouterr().err


@pytest.mark.usefixtures("trained")
def test_the_tuning_of_each_setting_is_drawn(arena, tmp_path) -> None:
    assert arena("--budget", "11", "--seeds", "0") == 0
    charts = (tmp_path / "out" / "report").glob("tuning-*.svg")
    drawn = {path.stem.removeprefix("tuning-batch4-"): path.read_text() for path in charts}
    assert drawn.keys() == {"lr", "rest-lr", "warmup", "momentum", "weight-decay"}
    assert "AdamW" in drawn["lr"]
    assert "MuonMERIT" in drawn["rest-lr"]
    assert "AdamW" not in drawn["rest-lr"]  # it has one rate
    assert "MuonMERIT" in drawn["momentum"]
    assert "AdamW" not in drawn["momentum"]  # it has betas


@pytest.mark.usefixtures("trained")
def test_collapsed_attention_gives_a_warning(arena, capsys) -> None:
    assert arena("--budget", "3", "--seeds", "0", "1") == 0
    warning = "the attention entropy fell from 3 to 0.2 nats with AdamW (batch 4): heads attend to few tokens"
    assert capsys.readouterr().err.count(warning) == 1


def trained_at(seconds: int, device: str = "cuda") -> MeasuredRun:
    """A run of ten seconds that began so long after the first minute of the year."""
    environment = {"device": {"type": device}, "started": f"2026-01-01T00:01:{seconds:02}+00:00"}
    return MeasuredRun("run", {}, environment, "finished", {"train": [{"step": 1, "seconds": 10.0}]})


@pytest.mark.parametrize(
    ("runs", "shared"),
    [
        ([trained_at(0), trained_at(12), trained_at(30)], False),
        ([trained_at(30), trained_at(5), trained_at(0)], True),
        ([trained_at(0, "cpu"), trained_at(5, "cpu")], False),  # each has cores of its own
    ],
)
def test_runs_on_a_gpu_at_the_same_time_are_noticed(runs: list[MeasuredRun], shared: bool) -> None:
    assert shared_a_gpu(runs) is shared
    assert (
        any("compare steps" in remark for remark in warnings([Board(4, [], None)], together=shared)) is shared
    )


def test_contestants_and_seeds_that_are_missing_give_a_warning() -> None:
    """As while another process trains them."""
    search = SimpleNamespace(at_edge=())
    standings: list[Any] = [
        SimpleNamespace(name="Muon", search=search, losses={0: 2.0, 1: 2.1}),
        SimpleNamespace(name="LAMB", search=search, losses={0: 3.0}),
    ]
    missing, fewer = warnings([Board(4, standings, None, ["AdamW", "MERIT"])], together=False)
    assert "without AdamW and MERIT" in missing
    assert "LAMB has 1 of 2 seeds" in fewer
    assert not warnings([Board(4, standings[:1], None)], together=False)


def run_with(losses: list[tuple[int, float]], status: str = "finished") -> MeasuredRun:
    rows = [{"kind": "validation", "step": step, "loss": loss} for step, loss in losses]
    return MeasuredRun("run", {}, {}, status, {"validation": rows})


def test_a_run_must_reach_the_loss_of_the_best_run_at_half_as_many_steps() -> None:
    best = run_with([(0, 10.0), (10, 6.0), (20, 4.0), (30, 3.0), (40, 2.5)])
    others = [run_with([(0, 10.0), (40, 3.0)]), run_with([(0, 1.0)], "diverged")]
    # A third of 40 steps is 13.3; the next validation is at step 20.
    assert bars_of([*others, best]) == (Bar(20, 6.0), Bar(30, 5.0))
    assert bars_of(others[1:]) == ()


def test_a_slow_tuning_run_is_abandoned_and_counts_as_tried(arena, trained, tmp_path) -> None:
    assert arena("--budget", "6", "--seeds", "0", "--lr", "adamw=6e-8") == 0
    statuses = [Run.open(folder).status for folder in trained if folder.name.startswith("adamw")]
    assert statuses.count("abandoned") >= 1
    assert len(statuses) == 6
    assert "given up" in (tmp_path / "out" / "report" / "table.md").read_text()


@pytest.mark.usefixtures("trained")
def test_runs_of_another_length_at_a_batch_that_comes_later_are_refused(arena, capsys) -> None:
    """The larger of two batches has half the steps; the runs that are there have all of them."""
    assert arena("--budget", "3", "--seeds", "0", "--batch", "8") == 0
    assert arena("--budget", "3", "--seeds", "0", "--batches", "4", "8") == 1
    assert "holds a run with a different" in (error := capsys.readouterr().err)
    assert "batch8" in error
    assert "steps" in error


@pytest.mark.usefixtures("trained")
def test_final_runs_of_another_length_are_refused(arena, tmp_path, capsys) -> None:
    assert arena("--budget", "3", "--seeds", "0", "1") == 0
    for run in (tmp_path / "out").glob("*-seed0"):
        shutil.rmtree(run)
    assert arena("--budget", "3", "--seeds", "0", "1", "--steps", "16") == 1
    assert "-seed1 holds a run with a different" in capsys.readouterr().err


@pytest.mark.usefixtures("trained")
def test_a_baseline_that_learns_nothing_has_a_page(arena, tmp_path, monkeypatch) -> None:
    """It reaches its final loss before the first step, and no share of that can be given."""
    monkeypatch.setitem(fake_arena.FLOOR, "adamw", 5.6)
    monkeypatch.setitem(fake_arena.FLOOR, "muon", 5.7)
    assert arena("--budget", "3", "--seeds", "0") == 0
    table = (tmp_path / "out" / "report" / "table.md").read_text()
    assert "%)" not in next(line for line in table.splitlines() if "MuonMERIT" in line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "adamw=0"], "a learning rate of adamw is 0; it must be above 0"),
        (["--budget", "2"], "--budget is 2; a contestant needs at least 3 runs"),
        (["--lr", "lion=1e-3"], "--lr has 1 for lion; give one rate for each contestant, of: adamw"),
        (["--lr", "muon=1", "muon=2"], "--lr has 2 for muon; give one rate for each contestant"),
        (["--measure.validation-every", "0"], "an arena compares validation losses"),
        (
            ["--measure.validation-every", "2"],
            "every 1 of 8 steps with a batch of 4; give at most 1, or leave",
        ),
        (
            ["--steps", "50", "--batches", "4", "8", "--measure.validation-every", "2"],
            "every 1 of 25 steps with a batch of 8",
        ),
        (["--seeds", "0", "0"], "the seeds are 0, 0; each may be given only once"),
        (["--optimizer.name", "lamb"], "--optimizer.name lamb applies to a single run; in an arena write"),
    ],
)
def test_invalid_options_are_refused(arena, options, message, capsys) -> None:
    assert arena(*options) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("trained")
def test_another_run_of_the_same_name_is_refused(arena, capsys) -> None:
    assert arena("--budget", "3", "--seeds", "0") == 0
    assert arena("--budget", "3", "--seeds", "0", "--optimizer.final", "0.5") == 1
    assert "holds a run with a different optimizer.final; the runs of an arena" in capsys.readouterr().err
