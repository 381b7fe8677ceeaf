"""Training with Muon's and SOAP's directions: options by name, two learning rates, checkpoints."""

import pytest
import torch

from merit_lab.models import build
from merit_lab.runs import Run
from merit_lab.train import train
from merit_lab.train.loop import Trainer
from merit_lab.train.optimizer import check_optimizer, create_optimizer

NAMES = ("muon-merit", "soap-merit", "muon", "normuon", "orscale", "soap")


@pytest.mark.parametrize("name", NAMES)
def test_a_run_learns(changed, tmp_path, name):
    train(changed(**{"optimizer.name": name}), tmp_path / "run")
    losses = [line["loss"] for line in Run.open(tmp_path / "run").metrics("validation")]
    assert losses[-1] < losses[0] - 0.5


def test_a_run_records_the_options_that_it_left_at_their_defaults(changed, tmp_path):
    options = ("ratio_bounds=[0,0.2]",)
    run = train(changed(**{"optimizer.name": "muon-merit", "optimizer.options": options}), tmp_path / "run")
    hidden, *rest = Run.open(run.folder).environment["optimizer"]
    assert (hidden["momentum"], hidden["neuron_beta"], hidden["ratio_bounds"]) == (0.9, 0.95, [0, 0.2])
    assert {group["direction"] for group in rest} == {"adam"}
    assert not any("params" in group or "param_names" in group for group in (hidden, *rest))


@pytest.mark.parametrize("name", ["muon-merit", "soap-merit", "orscale"])
def test_a_stopped_run_resumes_as_if_it_had_not_been(changed, tmp_path, monkeypatch, measured, name):
    config = changed(**{"optimizer.name": name})
    train(config, tmp_path / "whole")
    original = Trainer.take_step

    class Killed(BaseException):
        pass

    def take_step(self, micro_batches):
        if self.step == 7:
            raise Killed
        return original(self, micro_batches)

    monkeypatch.setattr(Trainer, "take_step", take_step)
    with pytest.raises(Killed):
        train(config, tmp_path / "stopped")
    monkeypatch.undo()
    train(config, tmp_path / "stopped", resume=True)
    whole, stopped = (measured(Run.open(tmp_path / folder)) for folder in ("whole", "stopped"))
    assert stopped == whole


def test_the_schedule_scales_the_rates_of_all_groups(changed, tmp_path, monkeypatch):
    seen = []
    original = Trainer.accumulate_gradients

    def accumulate_gradients(self, micro_batches):
        seen.append(
            {name: group["lr"] for group in self.optimizer.param_groups for name in group["param_names"]}
        )
        return original(self, micro_batches)

    monkeypatch.setattr(Trainer, "accumulate_gradients", accumulate_gradients)
    chosen = {"name": "muon-merit", "options": ("rest_lr=0.03",), "overrides": ("*norm*:lr=0.05",)}
    run = train(changed(**{f"optimizer.{key}": value for key, value in chosen.items()}), tmp_path / "run")
    recorded = torch.tensor([line["lr"] for line in run.metrics("train")], dtype=torch.float64)
    assert recorded.max() == 1e-2
    assert len(set(recorded.tolist())) > 5  # warm-up and cosine
    for name in seen[0]:
        rates = torch.tensor([step[name] for step in seen], dtype=torch.float64)
        share = 5 if "norm" in name else 3 if "embedding" in name else 1
        torch.testing.assert_close(rates, share * recorded)


def test_options_reach_the_optimizer(changed):
    options = ("momentum=0.8", "ns_dtype=float32", "nesterov=false", "ns_coefficients=[2, -1.5, 0.5]")
    config = changed(**{"optimizer.name": "muon-merit", "optimizer.options": options})
    group = create_optimizer(config, build(config.model)).param_groups[0]
    assert (group["momentum"], group["nesterov"], group["ns_dtype"]) == (0.8, False, "float32")
    assert group["ns_coefficients"] == (2, -1.5, 0.5)


def test_parts_of_a_weight_are_set_by_pattern(changed):
    overrides = ("*query_key_value*:split=3",)
    config = changed(**{"optimizer.name": "muon-merit", "optimizer.overrides": overrides})
    groups = create_optimizer(config, build(config.model)).param_groups
    split = [name for group in groups if group.get("split") == 3 for name in group["param_names"]]
    assert split == [f"blocks.{i}.attention.query_key_value.weight" for i in range(2)]


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("muon-merit", "momentm=0.9", "momentm, which MuonMERIT does not take; did you mean 'momentum'"),
        ("muon-merit", "momentum=2", "momentum is 2; it must be at least 0 and less than 1"),
        ("muon-merit", "ns_dtype=int8", "ns_dtype is 'int8'; it must be one of"),
        ("merit", "momentum=0.9", "has momentum, which MERIT does not take. It takes lr, betas"),
        ("adamw", "momentum=0.9", "has momentum, which AdamW does not take. It takes lr, betas"),
    ],
)
def test_an_option_that_the_optimizer_does_not_have_is_refused(changed, name, option, match):
    config = changed(**{"optimizer.name": name, "optimizer.options": (option,)})
    with pytest.raises(ValueError, match=match):
        check_optimizer(config)


@pytest.mark.parametrize("option", ["momentum", "=3", "0.9=momentum", "lr=0.1", "weight_decay=0"])
def test_a_malformed_option_is_refused(changed, option):
    with pytest.raises(ValueError, match=r"optimizer\.options has"):
        changed(**{"optimizer.options": (option,)})


def test_betas_are_refused_if_the_optimizer_has_none(changed):
    config = changed(**{"optimizer.name": "muon", "optimizer.betas": (0.9, 0.95)})
    with pytest.raises(ValueError, match="betas"):
        check_optimizer(config)
