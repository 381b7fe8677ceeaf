"""Training with Muon's and SOAP's directions: options by name, two learning rates, checkpoints."""

import pytest
import torch

from merit_lab.runs import Run
from merit_lab.train import train
from merit_lab.train.loop import Trainer
from merit_lab.train.optimizer import options_in_use


def test_a_run_records_the_options_that_it_left_at_their_defaults(changed, tmp_path):
    options = ("ratio_bounds=[0,0.2]",)
    run = train(changed(**{"optimizer.name": "muon-merit", "optimizer.options": options}), tmp_path / "run")
    groups = Run.open(run.folder).environment["optimizer"]
    (hidden,) = (group for group in groups if group["kind"] == "hidden")
    rest = [group for group in groups if group is not hidden]
    assert (hidden["momentum"], hidden["neuron_beta"], hidden["ratio_bounds"]) == (0.9, 0.95, [0, 0.2])
    assert {group["direction"] for group in rest} == {"adam"}
    assert not any("params" in group or "param_names" in group for group in (hidden, *rest))


def test_the_schedule_scales_the_rates_of_all_groups(changed, tmp_path, monkeypatch):
    seen = []
    original = Trainer.accumulate_gradients

    def accumulate_gradients(self, micro_batches):
        seen.append(
            {
                name: group["lr"] * group["rate_scale"]
                for group in self.optimizer.param_groups
                for name in group["param_names"]
            }
        )
        return original(self, micro_batches)

    monkeypatch.setattr(Trainer, "accumulate_gradients", accumulate_gradients)
    chosen = {"name": "muon-merit", "rate_scale": 3.0, "overrides": ("*norm*:lr=0.05",)}
    run = train(changed(**{f"optimizer.{key}": value for key, value in chosen.items()}), tmp_path / "run")
    recorded = torch.tensor([line["lr"] for line in run.metrics("train")], dtype=torch.float64)
    assert recorded.max() == 1e-2
    assert len(set(recorded.tolist())) > 5  # warm-up and cosine
    for name in seen[0]:
        rates = torch.tensor([step[name] for step in seen], dtype=torch.float64)
        share = 5 if "norm" in name else 3 if "embedding" in name else 1
        torch.testing.assert_close(rates, share * recorded)


@pytest.mark.parametrize(
    ("name", "option", "match"),
    [
        ("muon-merit", "momentm=0.9", "momentm, which MuonMERIT does not take; did you mean 'momentum'"),
        ("muon-merit", "momentum=2", "momentum is 2; it must be at least 0 and less than 1"),
        ("merit", "momentum=0.9", "has momentum, which MERIT does not take. It takes lr, weight_decay"),
        ("merit", "rate_scale=2", "has 'rate_scale=2'; write --optimizer.rate-scale"),
    ],
)
def test_an_option_that_the_optimizer_does_not_have_is_refused(changed, name, option, match):
    with pytest.raises(ValueError, match=match):
        options_in_use(changed(**{"optimizer.name": name, "optimizer.options": (option,)}))


def test_a_rate_scale_is_for_optimizers_that_give_weights_to_adamw(changed):
    with pytest.raises(ValueError, match="rate_scale is 2, but merit gives no weights to AdamW"):
        options_in_use(changed(**{"optimizer.name": "merit", "optimizer.rate_scale": 2.0}))


OWN_CHOICE = """
from dataclasses import dataclass

from merit_optim import Hold, compose, register


@register("test-half-decay")
@dataclass(frozen=True, kw_only=True)
class HalfDecay(Hold):
    share: float = 0.5

    def apply(self, weight, change, state, move):
        return weight * (1 - self.share * move.lr * move.weight_decay) - change * move.lr, state


def mine(params, lr, weight_decay=0.1, momentum=0.9, share=0.5):
    own = {"direction": "muon", "hold": "test-half-decay", "momentum": momentum, "share": share}
    return compose(params, lr=lr, weight_decay=weight_decay, **own)
"""


def test_a_choice_of_a_users_file_trains(changed, tmp_path, monkeypatch):
    (tmp_path / "my_choice.py").write_text(OWN_CHOICE)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"optimizer.name": "my_choice:mine", "optimizer.lr": 0.02, "optimizer.options": ("share=0.3",)}
    config = changed(**options)
    run = train(config, tmp_path / "run")
    of_hidden = [
        group for group in Run.open(run.folder).environment["optimizer"] if group["kind"] == "hidden"
    ]
    assert [(group["hold"], group["share"]) for group in of_hidden] == [("test-half-decay", 0.3)]
    losses = [line["loss"] for line in run.metrics("train")]
    assert losses[-1] < losses[0]
