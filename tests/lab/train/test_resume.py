import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from merit_lab.runs import Run, is_locked
from merit_lab.train import checkpoint, command, loop, start, train
from merit_lab.train.checkpoint import steps_of
from merit_lab.train.command import main
from merit_lab.train.loop import Trainer
from merit_optim.cli import main as merit

HOLD = """
import pathlib, sys, time
from merit_lab.runs import lock
with lock(pathlib.Path(sys.argv[1])):
    time.sleep(1.5)
"""
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
COMMAND = "import sys; from merit_lab.train.command import main; sys.exit(main(sys.argv[1:]))"


class Killed(BaseException):
    """Ends a run like SIGKILL: nothing catches it."""


@pytest.fixture
def handle_hangup():
    """Set the handler of SIGHUP, which may be ignored where the tests run."""
    before = signal.getsignal(signal.SIGHUP)
    yield partial(signal.signal, signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """Uninterrupted runs, each trained once."""
    runs = {}

    def run(config):
        if config not in runs:
            runs[config] = train(config, tmp_path_factory.mktemp("undisturbed"))
        return runs[config]

    return run


def what_happened(run):
    return [event["what"] for event in run.metrics("event")]


@pytest.mark.parametrize("step", [3, 6, 11])
def test_a_run_that_died_resumes_bit_for_bit(step, toy, tmp_path, die_before_step, never_stopped, measured):
    die_before_step(toy, tmp_path, step)
    assert Run.open(tmp_path).status == "unfinished"
    run = train(None, tmp_path, resume=True)
    assert run.status == "finished"
    assert measured(run) == measured(never_stopped(toy))


@pytest.mark.parametrize("name", ["sophiag", "muon-merit", "soap-merit"])
def test_every_optimizer_resumes_bit_for_bit(
    name, changed, tmp_path, die_before_step, never_stopped, measured
):
    config = changed(**{"optimizer.name": name, "optimizer.lr": 1e-3, "micro_batch": 4})
    die_before_step(config, tmp_path, 7)
    assert measured(train(config, tmp_path, resume=True)) == measured(never_stopped(config))


# Before the first checkpoint, and after it.
@pytest.mark.parametrize("step", [3, 7])
def test_auto_resume_starts_and_resumes_a_run(step, toy, tmp_path, die_before_step, never_stopped, measured):
    die_before_step(toy, tmp_path / "run", step, resume="auto")
    run = train(toy, tmp_path / "run", resume="auto")
    assert measured(run) == measured(never_stopped(toy))
    assert what_happened(run) == (["resumed", "finished"] if step < 5 else ["started", "resumed", "finished"])


def test_auto_resume_leaves_a_run_that_is_over(toy, changed, tmp_path, capfd, monkeypatch):
    diverging = changed(**{"optimizer.name": "adamw", "optimizer.lr": 1e38})
    for status, config in {"finished": toy, "diverged": diverging}.items():
        metrics = train(config, tmp_path / status, resume="auto").metrics_path
        before = metrics.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "run", lambda _: pytest.fail("it trains again"))
            assert train(config, tmp_path / status, resume="auto").status == status
        assert metrics.read_bytes() == before
        message = f"the run in {tmp_path / status} has already {status}; nothing is left to do"
        assert message in capfd.readouterr().err


def test_auto_resume_waits_for_a_process_that_is_about_to_end(
    toy, tmp_path, die_before_step, capfd, monkeypatch
):
    die_before_step(toy, tmp_path, 6)
    monkeypatch.setattr(start, "_RESTART_TIMEOUT", 30)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)]) as process:
        while not is_locked(tmp_path):
            time.sleep(0.01)
        assert train(toy, tmp_path, resume="auto").status == "finished"
    assert process.returncode == 0
    assert f"{tmp_path} is in use; waiting for at most 30 seconds" in capfd.readouterr().err


@pytest.mark.parametrize("function", ["_write_tensors", "_hash_files", "_complete", "_tidy"])
def test_a_run_that_died_while_it_saved(function, toy, tmp_path, monkeypatch, never_stopped, measured):
    original, calls = getattr(checkpoint, function), []

    def dies_the_second_time(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(checkpoint, function, dies_the_second_time)
    with pytest.raises(Killed):
        train(toy, tmp_path)
    monkeypatch.undo()
    run = train(None, tmp_path, resume=True)
    assert measured(run) == measured(never_stopped(toy))
    assert not list(run.checkpoints.glob("*.partial"))


def test_kill_9_at_any_moment(changed, tmp_path, never_stopped, measured):
    config = changed(**{"checkpoint.every_steps": 3, "steps": 60})
    expected = measured(never_stopped(config))
    path = tmp_path / "list"
    path.write_text(json.dumps({"name": "run", **config.to_dict()}) + "\n")
    arguments = ["--list", str(path), "--out", str(tmp_path)]
    moments = random.Random(int(time.time()))
    lines = [moments.randrange(1, 45), moments.randrange(46, 85)]
    for wanted in lines:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        metrics = tmp_path / "run" / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.exists() and metrics.read_bytes().count(b"\n") >= wanted
        ):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"finished before {lines} lines were there"
        arguments = ["--resume", str(tmp_path / "run")]
    assert main(arguments) == 0
    run = Run.open(tmp_path / "run")
    assert run.status == "finished"
    assert measured(run) == expected, f"killed when {lines} lines were there"


def test_a_run_that_died_at_its_target_is_at_its_end(changed, tmp_path, monkeypatch):
    losses = {
        line["step"]: line["loss"] for line in train(changed(), tmp_path / "whole").metrics("validation")
    }
    config = changed(target=losses[8])
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_tidy", mock.Mock(side_effect=[None, Killed]))
        with pytest.raises(Killed):
            train(config, tmp_path / "killed")
    run = train(config, tmp_path / "killed", resume=True)
    assert (run.status, run.metrics("train")[-1]["step"]) == ("finished", 8)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_and_stops(
    signum, toy, tmp_path, before_step, handle_hangup, monkeypatch, never_stopped, measured, capfd
):
    before_step(7, lambda: os.kill(os.getpid(), signum))
    monkeypatch.setattr(command, "parse", lambda _: (toy, tmp_path / "run", False))
    handle_hangup(signal.SIG_DFL)
    handlers = list(map(signal.getsignal, SIGNALS))
    assert main([]) == 128 + signum
    assert list(map(signal.getsignal, SIGNALS)) == handlers
    run = Run.open(tmp_path / "run")
    message = capfd.readouterr().err
    assert f"stopped by {signum.name} after step 8" in message
    assert f"merit train --resume {run.folder}" in message
    assert run.status == "interrupted"
    assert (run.checkpoints / "step-00000008").exists()
    monkeypatch.undo()
    assert measured(train(None, run.folder, resume=True)) == measured(never_stopped(toy))
    assert what_happened(run) == ["started", "interrupted", "resumed", "finished"]


def test_a_run_under_nohup_outlives_its_terminal(toy, tmp_path, before_step, handle_hangup):
    handle_hangup(signal.SIG_IGN)
    before_step(7, lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert train(toy, tmp_path).status == "finished"


def test_a_second_keyboard_interrupt_stops_at_once(toy, tmp_path, before_step):
    def press_twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    before_step(7, press_twice)
    with pytest.raises(KeyboardInterrupt):
        train(toy, tmp_path)


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def test_a_second_interrupt_while_the_checkpoint_is_written(toy, tmp_path, before_step, monkeypatch, capfd):
    before_step(3, interrupt)
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", interrupt)
    monkeypatch.setattr(command, "parse", lambda _: (toy, tmp_path, False))
    assert merit(["train"]) == 128 + signal.SIGINT
    printed = capfd.readouterr().err
    assert "merit train: interrupted" in printed
    assert "written" not in printed


def test_a_signal_in_the_last_step_is_left_to_the_caller(toy, tmp_path, before_step):
    before_step(11, lambda: os.kill(os.getpid(), signal.SIGTERM))
    came = []
    handler = signal.signal(signal.SIGTERM, lambda signum, _: came.append(signum))
    try:
        assert train(toy, tmp_path).status == "finished"
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert came == [signal.SIGTERM]


def test_checkpoints_by_the_clock(changed, tmp_path, monkeypatch):
    """Steps take 25 seconds by this clock, and a checkpoint is due after more than a minute."""
    now = 0.0
    take_step = Trainer.take_step

    def slow(self, micro_batches):
        nonlocal now
        now += 25
        return take_step(self, micro_batches)

    monkeypatch.setattr(Trainer, "take_step", slow)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now))
    config = changed(**{"checkpoint.every_steps": 0, "checkpoint.every_minutes": 1, "checkpoint.keep": 99})
    assert steps_of(train(config, tmp_path / "run").checkpoints) == [3, 6, 9, 12]


def test_a_run_resumes_only_with_its_configuration(toy, changed, tmp_path, die_before_step):
    die_before_step(toy, tmp_path, 6)
    differ = "batch is 8 there and 4 here, seed is 0 there and 5 here. A run is resumed with"
    for resume in (True, "auto"):
        with pytest.raises(ValueError, match=f"a run with a different configuration: {differ}"):
            train(changed(batch=4, seed=5), tmp_path, resume=resume)
    assert train(toy, tmp_path, resume="auto").status == "finished"
    with pytest.raises(ValueError, match=r"optimizer\.lr is 0\.01 there and 0\.02 here"):
        train(changed(**{"optimizer.lr": 0.02}), tmp_path, resume="auto")


def test_an_edited_configuration_is_detected(toy, tmp_path, die_before_step):
    die_before_step(toy, tmp_path, 6)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ValueError, match=r"different configuration than .*config\.json"):
        train(None, tmp_path, resume=True)


def test_data_may_move_but_not_change(changed, data, tmp_path, die_before_step, never_stopped, measured):
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    config = changed(data=moved)
    die_before_step(config, tmp_path / "run", 6)
    with (moved / "val.bin").open("r+b") as file:
        file.write(b"\1\0")
    with pytest.raises(ValueError, match="does not hold the data that the run was trained on"):
        train(None, tmp_path / "run", resume=True)
    shutil.rmtree(moved)
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace(str(moved), str(data)))
    run = train(None, tmp_path / "run", resume=True)
    assert measured(run) == measured(never_stopped(changed()))


# --- runs that are kept ------------------------------------------------------------------------------------


def test_a_kept_run_that_has_finished_is_over_and_leaves_no_trace(run, keep_only, tmp_path, capsys):
    keep_only(tmp_path)
    for folder in (run, tmp_path / "runs.parquet" / run.name):
        assert main(["--resume", str(folder)]) == 0
        assert "has already finished; nothing is left to do" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"runs.parquet", "runs.parquet.sha256"}
