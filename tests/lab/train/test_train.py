import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from merit_lab.models import flops_per_token
from merit_lab.runs import Run
from merit_lab.train import train
from merit_lab.train.loop import Trainer
from merit_lab.train.parallel import Ranks
from merit_lab.train.reports import Reporter, StepReports
from merit_optim.settings import SETTINGS

NAMES = ["adamw", "lion", "sophiag", "lamb", "maxlamb", "merit", "muon-merit", "soap-merit", "normuon"]


@pytest.fixture
def finished(toy, tmp_path):
    return train(toy, tmp_path / "run")


def losses(run):
    return [line["loss"] for line in run.metrics("train")]


def test_a_run_learns_and_measures_what_was_asked(finished, toy):
    assert finished.status == "finished"
    lines = finished.metrics("train")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["tokens"] == 12 * 8 * 32
    assert lines[0]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["grad_norm"] > 0 and line["tokens_per_second"] > 0 for line in lines)
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)
    assert max(line["lr"] for line in lines) == toy.optimizer.lr
    assert lines[-1]["lr"] == pytest.approx(0.1 * toy.optimizer.lr)

    assert [line["step"] for line in finished.metrics("validation")] == [0, 4, 8, 12]
    attention = finished.metrics("attention")
    assert [line["step"] for line in attention] == [0, 3, 6, 9, 11]
    assert [line["entropy"] is None for line in attention] == [False, True, False, True, False]
    assert torch.tensor(attention[0]["max_logits"]).shape == (2, 2)
    updates = finished.metrics("update")
    assert [line["step"] for line in updates] == [1, 6, 11, 12]
    statistics = updates[0]["parameters"]["token_embedding.weight"]
    assert set(statistics) == {"clipped", "bounded", "smallest_ratio", "largest_ratio", "relative_change"}


def test_the_weight_norm_is_that_of_the_weights_before_the_step(finished):
    (shard,) = (finished.checkpoints / "step-00000010").glob("*.safetensors")
    weights = [tensor for name, tensor in load_file(shard).items() if name.startswith("model.")]
    eleventh = finished.metrics("train")[10]
    assert eleventh["step"] == 11
    norm = math.sqrt(sum(tensor.double().square().sum().item() for tensor in weights))
    assert eleventh["weight_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_run_directory_says_what_was_run(finished):
    run = Run.open(finished.folder)
    assert run.config["optimizer"]["lr"] == 1e-2
    assert run.config["steps"] == 12
    assert run.environment["data"]["train_tokens"] == 100_000
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-00000010", "step-00000012"]
    assert list((run.folder / "tensorboard").iterdir())
    assert [event["what"] for event in run.metrics("event")] == ["started", "finished"]


def test_the_same_configuration_gives_the_same_bits_and_another_seed_others(
    finished, changed, tmp_path, measured
):
    assert measured(train(changed(), tmp_path / "again")) == measured(finished)
    assert losses(train(changed(seed=1), tmp_path / "other"))[0] != losses(finished)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_trains(name, changed, tmp_path):
    lr = None if SETTINGS[name].learning_rates else 1e-2  # the paper's, where it has one
    config = changed(**{"optimizer.name": name, "optimizer.lr": lr})
    run = train(config, tmp_path / "run")
    assert run.status == "finished"
    assert losses(run)[-1] < losses(run)[0]
    if name in NAMES[:6]:
        assert bool(run.metrics("update")) == (name not in ("adamw", "sophiag"))


@pytest.mark.parametrize("name", ["merit", "sophiag"])
def test_micro_batches_change_nothing_but_rounding(name, changed, tmp_path):
    config = {"optimizer.name": name, "optimizer.lr": 1e-3}
    whole = train(changed(**config, micro_batch=8), tmp_path / "whole")
    parts = train(changed(**config, micro_batch=3), tmp_path / "parts")
    # Sophia's curvature is estimated on the first micro-batch, which is another.
    steps = 1 if name == "sophiag" else 12
    assert losses(parts)[:steps] == pytest.approx(losses(whole)[:steps], abs=2e-4)
    for first, second in zip(whole.metrics("attention"), parts.metrics("attention"), strict=True):
        if first["step"] == 0:
            torch.testing.assert_close(torch.tensor(first["max_logits"]), torch.tensor(second["max_logits"]))
            torch.testing.assert_close(torch.tensor(first["entropy"]), torch.tensor(second["entropy"]))


@pytest.mark.parametrize("name", ["merit", "adamw"])
def test_gradients_are_clipped_and_the_norm_before_is_recorded(name, changed, tmp_path):
    config = {"optimizer.name": name, "optimizer.lr": 1e-3, "steps": 3}
    free = train(changed(**config, **{"optimizer.max_grad_norm": None}), tmp_path / "free")
    loose = train(changed(**config, **{"optimizer.max_grad_norm": 1e6}), tmp_path / "loose")
    tight = train(changed(**config, **{"optimizer.max_grad_norm": 1e-7}), tmp_path / "tight")
    norms = [[line["grad_norm"] for line in run.metrics("train")] for run in (free, loose, tight)]
    assert norms[0] == norms[1]
    assert norms[0][0] == norms[2][0]
    # A gradient as small as this is small beside eps, so the weights move otherwise.
    assert losses(free) == losses(loose) != losses(tight)


def test_bf16_weights_stay_float32(changed, tmp_path):
    from safetensors import safe_open

    run = train(changed(precision="bf16"), tmp_path / "run")
    assert losses(run)[-1] < losses(run)[0] - 0.3
    [shard] = (run.checkpoints / "step-00000012").glob("*.safetensors")
    with safe_open(shard, framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118


def test_only_what_is_configured_is_measured(changed, tmp_path):
    never = dict.fromkeys(("validation_every", "attention_every", "entropy_every", "update_every"), 0)
    run = train(changed(**{f"measure.{name}": value for name, value in never.items()}), tmp_path / "run")
    assert [run.metrics(kind) for kind in ("validation", "attention", "update")] == [[], [], []]


def test_seconds_count_only_steps(toy, tmp_path, monkeypatch):
    validate = Trainer.validate

    def dawdle(self):
        time.sleep(0.2)
        validate(self)

    monkeypatch.setattr(Trainer, "validate", dawdle)  # four times
    began = time.monotonic()
    run = train(toy, tmp_path)
    seconds = [line["seconds"] for line in run.metrics("train")]
    assert 0 < seconds[-1] < time.monotonic() - began - 0.8
    lengths = [later - earlier for earlier, later in pairwise([0.0, *seconds])]
    speeds = [line["tokens_per_second"] for line in run.metrics("train")]
    assert [8 * 32 / speed for speed in speeds] == pytest.approx(lengths, abs=1e-9)


def test_mfu_is_the_share_of_the_peak(toy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**31)
    moments = {name: SimpleNamespace(since=lambda _: 2.0) for name in ("ended", "optimizer_ended")}
    step = SimpleNamespace(began=None, optimizer_began=None, **moments)
    two = Ranks(0, 2, torch.device("cuda"))
    speed = StepReports(Reporter(), [], toy, two, seconds=1.0)._speed(step)
    assert speed["mfu"] == pytest.approx(8 * 32 / 2 * flops_per_token(toy.model) / (2 * 989e12))
    assert (speed["seconds"], speed["memory_gib"]) == (3.0, 2.0)


@pytest.mark.gpu
def test_training_on_a_gpu(changed, tmp_path):
    # One layer, and every step observed alike: what is compiled takes most of the time.
    observed = {"measure.attention_every": 1, "measure.entropy_every": 0}
    shape = {"model.width": 64, "model.heads": 4, "model.layers": 1, "batch": 64, "steps": 30}
    config = changed(**shape, **observed)
    run = train(config, tmp_path)
    lines = run.metrics("train")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert (
        0 < sum(64 * 32 / line["tokens_per_second"] for line in lines) == pytest.approx(lines[-1]["seconds"])
    )
    assert lines[-1]["memory_gib"] > 0
    assert all(line["mfu"] is None or 0 < line["mfu"] < 1 for line in lines)
    assert all(0 < line["optimizer_share"] < 1 for line in lines)


def test_a_run_finishes_at_its_target(changed, tmp_path):
    whole = train(changed(), tmp_path / "whole")
    losses = {row["step"]: row["loss"] for row in whole.metrics("validation")}
    run = train(changed(target=losses[4]), tmp_path / "run")
    assert run.status == "finished"
    assert run.metrics("validation") == whole.metrics("validation")[:2]
    assert run.metrics("event")[-1]["message"].endswith("after 4 of 12 steps")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
    assert train(changed(target=losses[4]), run.folder, resume="auto").status == "finished"
