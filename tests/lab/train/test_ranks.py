"""Runs on two processes, and runs that resume with another number of them."""

import json
import signal
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torchrun import forked

from merit_lab.runs import Run
from merit_lab.train import train
from merit_lab.train.checkpoint import read
from merit_lab.train.parallel import agree_on_name

WORKER = Path(__file__).with_name("disturbed_worker.py")


def on_two_ranks(config, folder, step=-1, how="never"):
    """Train or, without a configuration, resume; ``how`` ranks are disturbed is in the worker."""
    argument = "resume" if config is None else json.dumps(config.to_dict())
    return forked(2, WORKER, argument, str(folder), str(step), how, joined=False)


def assert_alike(run, other):
    """Check that two runs have the same numbers up to rounding."""
    for kind in ("train", "validation", "attention", "update"):
        lines, others = run.metrics(kind), other.metrics(kind)
        assert [line["step"] for line in lines] == [line["step"] for line in others]
        for line, another in zip(lines, others, strict=True):
            for key in {"loss", "grad_norm", "weight_norm", "lr", "tokens"} & set(line):
                assert line[key] == pytest.approx(another[key], rel=2e-4), (kind, line["step"], key)
            for key in ("max_logits", "entropy"):
                for layer, other_layer in zip(line.get(key) or [], another.get(key) or [], strict=True):
                    assert layer == pytest.approx(other_layer, rel=2e-3)


@pytest.fixture
def alone(toy, tmp_path):
    return train(toy, tmp_path / "alone")


def test_sharded_on_two_ranks_then_on_one(alone, changed, tmp_path):
    folder = tmp_path / "run"
    on_two_ranks(changed(parallel="fsdp2", micro_batch=2), folder, step=7, how="die")
    run = Run.open(folder)
    assert run.environment["num_ranks"] == 2
    saved = run.checkpoints / "step-00000005"
    shards = {path.name for path in saved.glob("*.safetensors")}
    assert len(shards) == 2
    assert read(saved).files.keys() == shards  # damage to any of them is noticed
    assert len(run.metrics("train")) == 7
    run = train(None, folder, resume=True)
    assert "num_ranks 2 -> 1" in run.metrics("event")[1]["message"]
    assert_alike(run, alone)


def test_two_external_optimizers_sharded_on_two_ranks_then_on_one(changed, tmp_path):
    options = {"optimizer.rest": "adamw", "optimizer.rest_lr": 2e-2}
    options["optimizer.name"] = "pytorch-optimizer:ScheduleFreeAdamW"  # weights to train and weights to use
    config = changed(parallel="fsdp2", micro_batch=2, **options)
    on_two_ranks(config, tmp_path / "run", step=7, how="die")
    assert (tmp_path / "run" / "checkpoints" / "step-00000005" / "manifest.json").exists()
    assert_alike(train(None, tmp_path / "run", resume=True), train(config, tmp_path / "alone"))


def test_an_optimizer_that_cannot_step_shards_is_reported(changed, tmp_path):
    options = {"optimizer.name": "pytorch-optimizer:SOAP", "optimizer.max_grad_norm": None}
    process = on_two_ranks(changed(parallel="fsdp2", micro_batch=2, **options), tmp_path / "run")
    assert process.returncode != 0
    assert "SOAP could not step sharded weights" in process.stderr
    assert "or use --parallel ddp" in process.stderr


def test_alone_then_replicated_on_two_ranks(alone, toy, tmp_path, die_before_step):
    folder = tmp_path / "run"
    die_before_step(toy, folder, 7)
    process = on_two_ranks(None, folder)
    assert process.returncode == 0, process.stderr
    assert_alike(Run.open(folder), alone)


def test_a_signal_to_one_rank_stops_all(alone, changed, tmp_path):
    folder = tmp_path / "run"
    process = on_two_ranks(changed(micro_batch=3), folder, step=7, how="signal")
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        assert f"rank {rank}: stopped by {signal.SIGTERM.name} after step 8" in process.stdout
    run = Run.open(folder)
    assert run.status == "interrupted"
    assert_alike(train(None, folder, resume=True), alone)


def test_an_error_of_the_first_rank_is_raised_on_every_rank(changed, tmp_path):
    process = on_two_ranks(changed(batch=7), tmp_path / "run")
    assert process.returncode != 0
    assert process.stderr.count("a batch of 7 sequences cannot be split equally among 2 ranks") >= 2
    assert not Path(tmp_path / "run" / "config.json").exists()


def test_a_file_that_one_rank_cannot_read_fails_the_checkpoint(changed, tmp_path):
    config = changed(parallel="fsdp2", micro_batch=2)
    process = on_two_ranks(config, tmp_path / "run", step=3, how="unreadable")
    assert process.returncode == 0, process.stderr
    run = Run.open(tmp_path / "run")
    warnings = [event for event in run.metrics("event") if event["what"] == "warning"]
    assert [event["step"] for event in warnings] == [5]
    assert (
        f"no checkpoint could be written to {run.checkpoints} (Input/output error)" in warnings[0]["message"]
    )
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000010", "step-00000012"]


def test_ranks_agree_on_a_name_that_earlier_ranks_did_not_have():
    """Also if one of the earlier processes asked and died before it had the answer."""
    store, names = HashStore(), []
    for _ in range(3):
        answers = {}

        def ask(rank, answers=answers):
            answers[rank] = agree_on_name(store, rank, 3)

        ranks = [threading.Thread(target=ask, args=(rank,), daemon=True) for rank in range(3)]
        for rank in ranks:  # the first rank begins alone
            rank.start()
            rank.join(0.05)
        for rank in ranks:
            rank.join(20)
        assert answers.keys() == {0, 1, 2}
        assert len(set(answers.values())) == 1
        names.append(answers[0])
        store.set("asks/2", "one that died")
    assert len(set(names)) == 3
