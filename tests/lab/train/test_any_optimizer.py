"""Optimizers by other authors: each learns, and goes on after a stop as if there had been none."""

import dataclasses
import sys

import pytest
import torch

from merit_lab.models import ModelConfig
from merit_lab.train import OptimizerConfig, train
from merit_lab.train.loop import Trainer

FIRST, STOP, STEPS = 3, 5, 8  # the first checkpoint, where a run is stopped, and where it ends


class Odd(torch.optim.SGD):
    """Keeps what torch.save could keep: words, nothing, lists in dictionaries, counts, other dtypes."""

    def __init__(self, params, lr, shrink: float = 0.5, weight_decay: float = 0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.defaults["shrink"] = shrink
        for group in self.param_groups:
            group["shrink"] = shrink

    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = (*group.get("seen", ()), len(group.get("seen", ())))[-3:]
            for parameter in group["params"]:
                self._change(parameter, group)
        return super().step(closure)

    def _change(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state.update(mood="up", nothing=None, flipped=False, history={"norms": [], 3: (1, 2.5)})
            state["mean"] = torch.zeros(parameter.shape, dtype=torch.bfloat16)
            state["exact"] = torch.zeros((), dtype=torch.float64)
            state["turned"] = torch.zeros(parameter.shape).T if parameter.ndim == 2 else torch.zeros(0)
        state["flipped"] = not state["flipped"]
        state["mood"] = "down" if state["mood"] == "up" else "up"
        state["history"]["norms"] = [*state["history"]["norms"], parameter.grad.norm()][-3:]
        state["mean"].lerp_(parameter.grad.bfloat16(), 0.3)
        state["exact"] += parameter.grad.double().sum() / 3
        scale = group["shrink"] if state["mood"] == "up" else sum(state["history"]["norms"])
        parameter.grad.mul_(scale / (1 + len(group["seen"]))).add_(state["mean"], alpha=0.1 * scale)
        parameter.grad.add_(state["exact"].sin().float(), alpha=1e-3)


CASES = {
    "Muon": OptimizerConfig(
        name="torch:Muon",
        lr=0.05,
        options=("momentum=0.9", "nesterov=true"),
        rest="adamw",
        rest_lr=0.01,
        rest_options=("betas=0.9,0.95",),
    ),
    "Adafactor": OptimizerConfig(name="torch:Adafactor", lr=0.05),
    "NAdam": OptimizerConfig(
        name="torch:nadam", lr=0.01, options=("betas=0.9,0.95", "decoupled_weight_decay=True")
    ),
    "LBFGS": OptimizerConfig(
        name="torch:LBFGS", lr=0.3, options=("max_iter=3", "history_size=4"), max_grad_norm=None
    ),
    "SOAP": OptimizerConfig(
        name="pytorch-optimizer:SOAP",
        lr=0.01,
        options=("precondition_frequency=2",),
        rest="merit",
        rest_lr=0.02,
    ),
    "Shampoo": OptimizerConfig(
        name="pytorch-optimizer:shampoo", lr=0.3, options=("preconditioning_compute_steps=2",)
    ),
    "Kron": OptimizerConfig(  # draws random numbers
        name="pytorch-optimizer:Kron", lr=0.01, options=("mu_dtype=bfloat16", "balance_prob=0.5")
    ),
    "ScheduleFreeAdamW": OptimizerConfig(name="pytorch-optimizer:ScheduleFreeAdamW", lr=0.03, final=1.0),
    "AdEMAMix": OptimizerConfig(name="pytorch-optimizer:AdEMAMix", lr=0.01, options=("betas=0.9,0.95,0.99",)),
    "Prodigy": OptimizerConfig(name="pytorch-optimizer:Prodigy", lr=1.0, options=("d0=1e-3",)),
    "CAME": OptimizerConfig(name="pytorch-optimizer:CAME", lr=0.01),
    "SAM": OptimizerConfig(  # computes the loss twice
        name="pytorch-optimizer:SAM", lr=0.01, options=("base_optimizer=torch:AdamW", "rho=0.02")
    ),
    "EmoNavi": OptimizerConfig(name="pytorch-optimizer:EmoNavi", lr=0.01),  # uses the loss
    "odd state": OptimizerConfig(name="any_mine:Odd", lr=0.3),
}


@pytest.fixture(autouse=True)
def _mine(monkeypatch):
    """This module under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "any_mine", sys.modules[__name__])


@pytest.fixture
def small(toy):
    """A configuration that trains in a moment, with an optimizer's fields."""

    def configure(optimizer):
        return dataclasses.replace(
            toy,
            model=ModelConfig(width=16, heads=2, layers=1, context=16, vocab_size=256),
            optimizer=optimizer,
            measure=dataclasses.replace(toy.measure, validation_every=2, attention_every=3),
            checkpoint=dataclasses.replace(toy.checkpoint, every_steps=FIRST),
            micro_batch=4,
            steps=STEPS,
        )

    return configure


class Stopped(BaseException):
    """Ends a run as a power cut would."""


@pytest.fixture
def stopped_and_resumed(monkeypatch):
    """Train until a step, and go on from the checkpoint before it."""

    def run(config, folder):
        original = Trainer.take_step

        def take_step(self, micro_batches):
            if self.step == STOP:
                raise Stopped
            return original(self, micro_batches)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "take_step", take_step)
            with pytest.raises(Stopped):
                train(config, folder)
        return train(config, folder, resume=True)

    return run


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_goes_on_as_if_it_had_not_been_stopped(
    case, small, stopped_and_resumed, measured, tmp_path
):
    config = small(CASES[case])
    whole = train(config, tmp_path / "whole")
    losses = [line["loss"] for line in whole.metrics("validation")]
    assert losses[-1] < losses[0] - 0.02
    assert measured(stopped_and_resumed(config, tmp_path / "stopped")) == measured(whole)
