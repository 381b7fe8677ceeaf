"""Optimizers of the user's, named as MODULE:CLASS."""

import pytest
import torch

from merit_optim.lab.compare.plan import plan
from merit_optim.lab.report.gather import display_name
from merit_optim.lab.train import OptimizerConfig, train
from merit_optim.lab.train.own_optimizer import load_class
from merit_optim.lab.train.snapshot import Snapshot


def weights(run):
    return Snapshot.find(run.folder).load_model(torch.device("cpu")).state_dict()


def test_a_class_of_torch_by_its_own_name_trains_as_the_one_that_is_known(changed, tmp_path):
    known = train(changed(**{"optimizer.name": "adamw", "optimizer.betas": (0.9, 0.95)}), tmp_path / "known")
    own = train(
        changed(**{"optimizer.name": "torch.optim:AdamW", "optimizer.betas": (0.9, 0.95)}), tmp_path / "own"
    )
    assert own.outcome == "finished"
    for (name, one), other in zip(weights(known).items(), weights(own).values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)  # the known one is fused


def test_it_goes_on_where_it_was_stopped(changed, tmp_path):
    config = changed(**{"optimizer.name": "torch.optim:RMSprop", "optimizer.lr": 1e-3})
    whole = train(config, tmp_path / "whole")
    train(config, tmp_path / "again")
    (tmp_path / "again" / "checkpoints" / "step-00000012").rename(tmp_path / "step-00000012")
    metrics = tmp_path / "again" / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if '"finished"' not in line]
    metrics.write_text("\n".join(lines) + "\n")
    again = train(None, tmp_path / "again", resume=True)
    for one, other in zip(weights(whole).values(), weights(again).values(), strict=True):
        assert torch.equal(one, other)


def test_folders_and_labels_have_the_class_alone(toy, tmp_path):
    (planned,) = plan(
        toy,
        tmp_path,
        optimizers=["torch.optim:SGD"],
        seeds=[0],
        learning_rates={"torch.optim:SGD": [0.1]},
    )
    assert planned.folder.name == "SGD-lr0.1-seed0"
    assert display_name("torch.optim:SGD") == "SGD"
    assert display_name("merit") == "MERIT"


@pytest.mark.parametrize("name", [":Mine", "module:", "a module:Mine", "module:Mine:too", "../module:Mine"])
def test_what_is_no_name_of_a_class(name):
    with pytest.raises(ValueError, match=r"as in my_package\.optimizers:Mine"):
        OptimizerConfig(name=name)


def test_a_record_can_be_read_without_the_module():
    assert OptimizerConfig(name="gone_since:Mine", lr=1.0).name == "gone_since:Mine"
    with pytest.raises(ValueError, match="gone_since"):
        load_class("gone_since:Mine")
