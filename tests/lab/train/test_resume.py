import dataclasses
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

import numpy as np
import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from merit_lab.data.corpora import text_files
from merit_lab.data.prepare import prepare
from merit_lab.runs import MetricsWriter, Run, RunInUse, durable, is_locked, lock
from merit_lab.train import Interrupted, checkpoint, command, loop, start, train
from merit_lab.train.checkpoint_files import steps_of
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


@pytest.fixture
def before_step(monkeypatch):
    """Run an action before a step."""

    def arrange(step, action):
        original = Trainer.take_step

        def take_step(self, micro_batches):
            if self.step == step:
                action()
            return original(self, micro_batches)

        monkeypatch.setattr(Trainer, "take_step", take_step)

    return arrange


@pytest.fixture
def die_before_step(before_step, monkeypatch):
    """Train a configuration until its process dies before a step."""

    def die(config, folder, step, resume=False):
        def kill():
            raise Killed

        before_step(step, kill)
        with pytest.raises(Killed):
            train(config, folder, resume=resume)
        monkeypatch.undo()

    return die


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


@pytest.mark.parametrize("step", [0, 3, 5, 6, 11])
def test_a_run_that_died_resumes_bit_for_bit(step, toy, tmp_path, die_before_step, never_stopped, measured):
    die_before_step(toy, tmp_path, step)
    assert Run.open(tmp_path).status == "unfinished"
    run = train(None, tmp_path, resume=True)
    assert run.status == "finished"
    assert measured(run) == measured(never_stopped(toy))


@pytest.mark.parametrize("name", ["adamw", "lion", "sophiag", "lamb"])
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


def test_auto_resume_starts_a_run_that_died_while_it_was_created(toy, tmp_path, monkeypatch):
    def dies(path, text):
        if path.name == "config.json":
            raise Killed
        write(path, text)

    write = durable.write
    monkeypatch.setattr(durable, "write", dies)
    with pytest.raises(Killed):
        train(toy, tmp_path, resume="auto")
    monkeypatch.undo()
    assert what_happened(train(toy, tmp_path, resume="auto")) == ["started", "finished"]


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


def test_auto_resume_needs_a_configuration_to_start(tmp_path):
    with pytest.raises(ValueError, match="a new run needs a configuration"):
        train(None, tmp_path, resume="auto")


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


def test_auto_resume_does_not_wait_forever(toy, tmp_path, die_before_step, monkeypatch):
    die_before_step(toy, tmp_path, 6)
    monkeypatch.setattr(start, "_RESTART_TIMEOUT", 0.1)
    with lock(tmp_path), pytest.raises(RunInUse, match=f"is in use by process {os.getpid()} on "):
        train(toy, tmp_path, resume="auto")


def test_a_run_may_die_again_and_again(toy, tmp_path, die_before_step, never_stopped, measured):
    die_before_step(toy, tmp_path, 6)
    die_before_step(None, tmp_path, 8, resume=True)
    die_before_step(None, tmp_path, 11, resume=True)
    run = train(None, tmp_path, resume=True)
    assert measured(run) == measured(never_stopped(toy))
    assert what_happened(run) == ["started", "resumed", "resumed", "finished"]


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
    options = ["--measure.validation-every", "4", "--measure.validation-sequences", "8"]
    options += [
        "--measure.attention-every",
        "3",
        "--measure.entropy-every",
        "6",
        "--measure.update-every",
        "5",
    ]
    options += ["--checkpoint.every-steps", "3", "--checkpoint.every-minutes", "0", "--optimizer.lr", "1e-2"]
    options += ["--model.width", "32", "--model.heads", "2", "--model.layers", "2", "--model.context", "32"]
    options += ["--batch", "8", "--steps", "60", "--data", str(config.data), "--out", str(tmp_path / "run")]
    arguments = ["tiny", *options]
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


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_and_stops(
    signum, toy, tmp_path, before_step, handle_hangup, monkeypatch, never_stopped, measured, capfd
):
    before_step(7, lambda: os.kill(os.getpid(), signum))
    monkeypatch.setattr(command, "parse", lambda _: (toy, tmp_path / "run", False, None))
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
    monkeypatch.setattr(command, "parse", lambda _: (toy, tmp_path, False, None))
    assert merit(["train"]) == 128 + signal.SIGINT
    printed = capfd.readouterr().err
    assert "merit train: interrupted" in printed
    assert "written" not in printed


def test_a_second_interrupt_while_a_checkpoint_is_read(toy, tmp_path, die_before_step, monkeypatch, capfd):
    def twice(*_):
        interrupt()
        interrupt()

    die_before_step(toy, tmp_path, 7)
    monkeypatch.setattr(HuggingFaceStorageReader, "read_data", twice)
    assert merit(["train", "--resume", str(tmp_path)]) == 128 + signal.SIGINT
    assert "merit train: interrupted" in capfd.readouterr().err


def test_a_signal_in_the_last_step_is_left_to_the_caller(toy, tmp_path, before_step):
    before_step(11, lambda: os.kill(os.getpid(), signal.SIGTERM))
    came = []
    handler = signal.signal(signal.SIGTERM, lambda signum, _: came.append(signum))
    try:
        assert train(toy, tmp_path).status == "finished"
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert came == [signal.SIGTERM]


def test_moved_data(toy, changed, tmp_path, die_before_step, never_stopped, measured):
    before = shutil.copytree(toy.data, tmp_path / "before")
    die_before_step(changed(data=before), tmp_path / "run", 6)
    before.rename(tmp_path / "after")
    with pytest.raises(ValueError, match="before"):
        train(None, tmp_path / "run", resume=True)
    run = train(changed(data=tmp_path / "after"), tmp_path / "run", resume=True)
    assert measured(run) == measured(never_stopped(toy))


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


def test_data_that_was_replaced_during_a_run(changed, tmp_path, die_before_step):
    """Other bytes of the same size, with the old dataset.json: refused on resuming and on starting."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text to learn\n" for number in range(5000)))
    prepare(text_files([text], 0.3), tmp_path / "data", tokenizer="bytes")
    config = changed(data=tmp_path / "data")
    die_before_step(config, tmp_path / "run", 6)
    path = tmp_path / "data" / "train.bin"
    np.fromfile(path, np.uint16)[::-1].tofile(path)
    for new_config, name in ((None, "run"), (config, "new")):
        with pytest.raises(ValueError, match=r"train.bin was changed or damaged after it was prepared"):
            train(new_config, tmp_path / name, resume=new_config is None)
    assert not (tmp_path / "new").exists()


def test_interrupted_is_not_an_error_of_the_run(toy, tmp_path, before_step):
    before_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as caught:
        train(toy, tmp_path)
    assert caught.value.signum == signal.SIGTERM


# --- runs that are kept ------------------------------------------------------------------------------------


def test_a_kept_run_that_has_finished_is_over_and_leaves_no_trace(run, keep_only, tmp_path, capsys):
    keep_only(tmp_path)
    for folder in (run, tmp_path / "runs.parquet" / run.name):
        assert main(["--resume", str(folder)]) == 0
        assert "has already finished; nothing is left to do" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["runs.parquet"]


def test_a_kept_run_that_diverged_cannot_resume_and_leaves_no_trace(run, keep_only, tmp_path, capsys):
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write({"kind": "event", "step": 6, "what": "diverged", "message": ""})
    keep_only(tmp_path)
    assert main(["--resume", str(run)]) == 1
    assert ", which has diverged, and no checkpoints to resume from" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["runs.parquet"]


def losses_of(run: Run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run.lines() if line["kind"] == "train"]


@pytest.mark.parametrize("schedule", ["wsd", "constant"])
def test_a_finished_run_is_extended_where_its_schedule_allows_it(toy, tmp_path, schedule, capfd):
    """Its first steps are those of the shorter run, and the others those of one trained at full length."""
    plan = {"schedule": "wsd", "decay": 0.5} if schedule == "wsd" else {"final": 1.0}
    optimizer = dataclasses.replace(toy.optimizer, warmup=0.25, **plan)
    short = train(dataclasses.replace(toy, steps=8, optimizer=optimizer), tmp_path / "short")
    kept = {path: path.read_bytes() for path in short.folder.rglob("*") if path.is_file()}
    long = train(
        dataclasses.replace(toy, steps=12, optimizer=dataclasses.replace(optimizer, warmup=2 / 12)),
        tmp_path / "long",
    )
    assert main(["--resume", str(short.folder), "--steps", "12", "--out", str(tmp_path / "longer")]) == 0
    begin = 4 if schedule == "wsd" else 8
    assert f" from step {begin} to 12" in capfd.readouterr().err
    longer = Run.open(tmp_path / "longer")
    assert losses_of(longer) == losses_of(long)
    assert longer.status == "finished"
    assert {path: path.read_bytes() for path in short.folder.rglob("*") if path.is_file()} == kept


def test_an_extension_that_is_killed_early_goes_on_from_where_it_began(toy, tmp_path, monkeypatch, capfd):
    optimizer = dataclasses.replace(toy.optimizer, final=1.0)
    short = train(dataclasses.replace(toy, steps=8, optimizer=optimizer), tmp_path / "short")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "take_step", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            main(["--resume", str(short.folder), "--steps", "12", "--out", str(tmp_path / "longer")])
    capfd.readouterr()
    assert main(["--resume", str(tmp_path / "longer")]) == 0
    assert "from step-00000008" in capfd.readouterr().err
    assert Run.open(tmp_path / "longer").status == "finished"


def test_an_extension_is_not_resumed_at_the_same_time(toy, tmp_path):
    with pytest.raises(ValueError, match=r"resume is 'auto' and extends is .*short; give only one"):
        train(toy, tmp_path / "run", resume="auto", extends=tmp_path / "short")


def test_a_cosine_cannot_be_extended(toy, tmp_path, capfd):
    run = train(dataclasses.replace(toy, steps=8), tmp_path / "run")
    assert main(["--resume", str(run.folder), "--steps", "12"]) == 1
    message = capfd.readouterr().err
    assert "cannot be extended to 12 steps: its learning rate is scheduled for 8 (cosine)" in message
    assert "--optimizer.schedule wsd" in message
    assert not (tmp_path / "run-steps12").exists()
    assert main(["--resume", str(run.folder), "--steps", "8"]) == 1
    assert "steps is 8, but the run already has 8" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["--resume", str(run.folder), "--out", "elsewhere"])
