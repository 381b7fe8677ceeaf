import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time

import pytest
import torch

from merit_lab.data import Dataset
from merit_lab.runs import RunInUse, lock
from merit_lab.train import pool, start, train
from merit_lab.train.command import main
from merit_lab.train.parallel import Ranks
from merit_lab.train.start import Starting


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Check that training is refused before a model is built, and leaves nothing behind."""

    def refuse(config, match):
        monkeypatch.setattr(pool, "build", lambda _: pytest.fail("a model was built"))
        with pytest.raises((ValueError, ModuleNotFoundError), match=match):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    return refuse


@pytest.fixture
def began(toy, tmp_path):
    """A run that has taken no step yet."""
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"))
    with contextlib.ExitStack() as held:
        return Starting(ranks, Dataset.open, held).start(toy, tmp_path / "run", False).run


@pytest.fixture
def copied_data(data, tmp_path):
    return shutil.copytree(data, tmp_path / "copied-data")


def test_a_truncated_file(refused, changed, copied_data):
    path = copied_data / "train.bin"
    path.write_bytes(path.read_bytes()[:-1])
    refused(changed(data=copied_data), r"train\.bin.*truncated")


def test_a_token_beyond_the_vocabulary(refused, changed, copied_data):
    with (copied_data / "val.bin").open("r+b") as file:
        file.seek(2 * 77)
        file.write((256).to_bytes(2, "little"))
    refused(changed(data=copied_data), r"val\.bin: token 77 is 256, but the vocabulary has 256 entries")


def test_no_validation_text(refused, changed, copied_data):
    path = copied_data / "val.bin"
    path.write_bytes(path.read_bytes()[:20])
    refused(changed(data=copied_data), r"val\.bin.*one sequence of context 32 needs 33")


def test_no_learning_rate(refused, changed):
    config = changed(**{"optimizer.name": "maxlamb", "optimizer.lr": None})
    refused(config, "no learning rate for maxlamb; pass --optimizer.lr")


def test_a_name_without_a_class_is_refused_before_its_learning_rate(refused, changed):
    config = changed(**{"optimizer.name": "torch:AdanW", "optimizer.lr": None})
    refused(config, r"torch.optim has no such class; did you mean 'AdamW'")
    config = changed(**{"optimizer.name": "torch:RMSprop", "optimizer.lr": None})
    refused(config, r"no learning rate for torch:RMSprop; .*\(the default of its class is 0.01\)")


def test_a_batch_that_the_ranks_cannot_share(toy, tmp_path):
    ranks = Ranks(rank=1, size=3, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="a batch of 8 sequences cannot be split equally among 3 ranks"):
        Starting(ranks, Dataset.open, contextlib.ExitStack()).start(toy, tmp_path, False)


def test_a_micro_batch_that_cannot_be_found(changed, tmp_path):
    ranks = Ranks(rank=0, size=2, device=torch.device("cuda"))
    config = changed(parallel="fsdp2")
    with pytest.raises(ValueError, match="fsdp2 needs --micro-batch"):
        Starting(ranks, Dataset.open, contextlib.ExitStack()).start(config, tmp_path, False)


def test_no_configuration(refused):
    refused(None, "needs a configuration")


def test_a_folder_that_holds_a_run(toy, tmp_path):
    train(toy, tmp_path)
    with pytest.raises(FileExistsError, match="holds a run already"):
        train(toy, tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batchh": 1}, "there is no batchh; the nearest is batch"),
        ({"steps": 1e9}, "steps is 1000000000.0; it must be a whole number"),
        ({"optimizer": {"lr": 10**400}}, r"config\.json is not the JSON that was written .*64 bits"),
        ({"model": {"width": "wide"}}, r"model\.width is 'wide'"),
        ({"data": None}, "data is None; it must be a string"),
    ],
)
def test_a_configuration_that_was_changed(change, match, began, monkeypatch):
    path = began.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    monkeypatch.setattr(pool, "build", lambda _: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match=match):
        train(None, began.folder, resume=True)


def test_an_environment_without_its_data(began):
    path = began.folder / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": {}}))
    with pytest.raises(ValueError, match=r"environment\.json does not say which data the run started with"):
        train(None, began.folder, resume=True)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (
            {"model.width": 2**26},
            "parameters .* need at least 805,306,514.5 GiB, but this machine has 1.0 GiB",
        ),
        ({"batch": 2**22}, "batches of 4194304 sequences of 32 tokens need at least 2.0 GiB"),
    ],
)
def test_runs_that_do_not_fit_into_memory(values, match, refused, changed, tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{2**30}\n")  # as in a container
    monkeypatch.setattr(start, "_LIMIT_OF_A_CONTAINER", limit)
    monkeypatch.setattr(start, "options_in_use", lambda _: pytest.fail("a model was built"))
    refused(changed(**values), match)


def test_missing_weights_and_biases(refused, changed, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(changed(**{"measure.wandb": "project"}), "pip install wandb")


def hold(folder, held):
    with lock(folder):
        held.set()
        time.sleep(600)


def test_two_processes_on_one_directory(toy, tmp_path, capfd):
    run = train(toy, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=hold, args=(run.folder, held))
    holder.start()
    try:
        assert held.wait(30)
        with pytest.raises(RunInUse, match=f"in use by process {holder.pid} on"):
            train(None, run.folder, resume=True)
        assert main(["--resume", str(run.folder)]) == 1
        assert f"process {holder.pid}" in capfd.readouterr().err
    finally:
        os.kill(holder.pid, 9)
        holder.join()
    after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    assert {**after, run.folder / "lock": b""} == {**before, run.folder / "lock": b""}
    assert train(None, run.folder, resume=True).status == "finished"


@pytest.mark.parametrize("kind", ["flex", "cudnn"])
def test_attention_that_the_device_does_not_have(kind, refused, changed):
    refused(changed(**{"model.attention": kind}), f"attention '{kind}' needs CUDA")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer.betas": (1.5, 0.9)}, "betas"),
        ({"optimizer.overrides": ("*:foo=1",)}, "sets foo, which merit does not have"),
        ({"optimizer.overrides": ("*nowhere*:eps=1",)}, "nowhere"),
        ({"optimizer.name": "adamw", "optimizer.overrides": ("*:clip=1",)}, "sets clip, which adamw"),
        (
            {"optimizer.name": "adamw", "optimizer.overrides": ("*:betas=1",)},
            r"'betas': 1} .*which adamw refuses",
        ),
        ({"optimizer.name": "adamw", "optimizer.overrides": ("*:betas=[2, 0.9]",)}, "beta parameter.*2"),
    ],
)
def test_options_that_the_optimizer_refuses(options, match, refused, changed):
    refused(changed(**options), match)
