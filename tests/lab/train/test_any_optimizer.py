"""External optimizers: each learns, and resumes after a stop as if there had been none."""

import dataclasses
import math
import sys

import pytest
import torch

from merit_lab.data import validation_sequences
from merit_lab.models import ModelConfig, build
from merit_lab.train import OptimizerConfig, train
from merit_lab.train.loop import Trainer
from merit_lab.train.optimizer import create_optimizer, options_in_use
from merit_lab.train.parallel import Ranks
from merit_lab.train.snapshot import Snapshot
from merit_lab.train.steps import take_step, validation_loss
from merit_optim import MERIT

ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
FIRST, STOP, STEPS = 3, 5, 8  # the first checkpoint, where a run is stopped, and where it ends


class Odd(torch.optim.SGD):
    """Keeps state that torch.save could store: strings, None, nested lists, counts, other dtypes."""

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
        # As MADGRAD and SPAM: state of no weight.
        self.state["total"] = self.state.get("total", torch.zeros(())) + 0.1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(self.state["total"].cos())
        return super().step(closure)

    def _change(self, parameter, group):
        state = self.state[parameter]
        if not state:
            state.update(mood="up", nothing=None, flipped=False, history={"norms": [], 3: (1, math.inf)})
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


class OddOfOurs(MERIT):
    """A subclass of ours with additional state, some of which appears only after a few steps."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mood = "down" if state.get("mood", "up") == "up" else "up"
                if state:
                    state["mood"] = mood
                    state.setdefault("norms", []).append(parameter.grad.norm())
                    parameter.grad.mul_(0.5 if mood == "up" else 2).mul_(1 + 0.1 * len(state["norms"]))
        super().step(closure)


class Wrapped(torch.optim.Adam):
    """Has a state dict of a custom format."""

    def state_dict(self):
        return {"inside": super().state_dict(), "count": 3}

    def load_state_dict(self, state_dict):
        assert state_dict["count"] == 3
        super().load_state_dict(state_dict["inside"])


CASES = {
    "Muon": OptimizerConfig(
        name="torch:Muon",
        lr=0.05,
        options=("momentum=0.9", "nesterov=true"),
        rest="adamw",
        rest_lr=0.01,
        rest_options=("betas=0.9,0.95",),
    ),
    "Muon with a built-in AdamW": OptimizerConfig(
        name="pytorch-optimizer:Muon", lr=0.02, options=("adamw_lr=0.01",)
    ),
    "Adafactor": OptimizerConfig(name="torch:Adafactor", lr=0.05),
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
    "EmoNavi": OptimizerConfig(name="pytorch-optimizer:EmoNavi", lr=0.01),  # uses the loss
    "odd state": OptimizerConfig(name="any_mine:Odd", lr=0.3),
    "odd state of ours": OptimizerConfig(name="any_mine:OddOfOurs", lr=0.05),
    "odd state dict": OptimizerConfig(name="any_mine:Wrapped", lr=0.01),
}


@pytest.fixture(autouse=True)
def _mine(monkeypatch):
    """Make this module importable as ``mine``."""
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


def create(config):
    return create_optimizer(config, build(config.model))


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_resumes_as_if_it_had_not_been_stopped(
    case, small, die_before_step, measured, tmp_path
):
    config = small(CASES[case])
    torch.backends.mkldnn.enabled = False  # on some CPUs the first step of torch's Muon does that
    whole = train(config, tmp_path / "whole")
    losses = [line["loss"] for line in whole.metrics("validation")]
    assert losses[-1] < losses[0] - 0.02
    die_before_step(config, tmp_path / "stopped", STOP)
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert [event["what"] for event in resumed.metrics("event")] == ["started", "resumed", "finished"]
    assert measured(resumed) == measured(whole)


# --- a second optimizer ------------------------------------------------------------------------------------


def test_the_first_optimizer_has_hidden_matrices_and_the_second_the_rest(small):
    pair = create(small(CASES["Muon"]))
    first, rest = pair.parts
    assert isinstance(first, torch.optim.Muon)
    assert isinstance(rest, torch.optim.AdamW)
    names = [[name for group in part.param_groups for name in group["param_names"]] for part in pair.parts]
    assert all("blocks" in name and name.endswith("weight") and "norm" not in name for name in names[0])
    assert "token_embedding.weight" in names[1]
    assert not {*names[0]} & {*names[1]}
    assert {group["weight_decay"] for group in rest.param_groups} == {0.1, 0.0}


def test_an_optimizer_for_matrices_only_needs_a_second_one(small):
    with pytest.raises(ValueError, match=r"2D parameters.*as in --optimizer\.rest adamw"):
        options_in_use(small(dataclasses.replace(CASES["Muon"], rest=None, rest_lr=None, rest_options=())))


def test_both_optimizers_follow_the_schedule_with_separate_peaks(small, tmp_path, monkeypatch):
    seen = []
    original = Trainer.accumulate_gradients

    def accumulate_gradients(self, micro_batches):
        seen.append([group["lr"] for group in self.optimizer.param_groups])
        return original(self, micro_batches)

    monkeypatch.setattr(Trainer, "accumulate_gradients", accumulate_gradients)
    train(small(CASES["Muon"]), tmp_path / "run")
    first, *rest = torch.tensor(seen, dtype=torch.float64).T
    assert first.max() == 0.05
    for rates in rest:
        assert rates.max() == 0.01
        torch.testing.assert_close(rates, first / 5)


def test_gradients_of_both_are_clipped_together_and_bad_steps_skipped(small):
    chosen = OptimizerConfig(name="torch:SGD", lr=1.0, rest="lamb", rest_lr=1.0, max_grad_norm=0.5)
    config = dataclasses.replace(small(chosen), nonfinite="skip")
    model = build(config.model)
    pair, weights = create_optimizer(config, model), list(model.parameters())
    assert all(group["max_grad_norm"] is None for group in pair.parts[1].param_groups)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    before = [weight.detach().clone() for weight in weights]

    def step():
        norms = torch.stack([weight.grad.norm() for weight in weights])
        take_step(pair, config, norms, weights, torch.tensor(1.0), 0)

    step()
    assert torch.stack([weight.grad.norm() for weight in weights]).norm() == pytest.approx(0.5, rel=1e-4)
    assert not any(map(torch.equal, weights, before))
    before = [weight.detach().clone() for weight in weights]
    weights[-1].grad[0] = float("nan")
    step()
    assert all(map(torch.equal, weights, before))


def test_options_of_some_parameters_are_those_of_their_optimizer(small):
    chosen = dataclasses.replace(
        CASES["Muon"], overrides=("*embedding*:betas=[0.8, 0.9]", "*.mlp.*:momentum=0.5")
    )
    first, rest = create(small(chosen)).parts
    assert {group["momentum"] for group in first.param_groups} == {0.5, 0.9}
    assert {tuple(group["betas"]) for group in rest.param_groups} == {(0.8, 0.9), (0.9, 0.95)}
    with pytest.raises(ValueError, match="sets momentum, which adamw does not have"):
        create(small(dataclasses.replace(chosen, overrides=("*embedding*:momentum=0.5",))))


# --- two sets of weights -----------------------------------------------------------------------------------


def test_evaluation_weights_are_measured_and_saved(small, tmp_path, monkeypatch):
    trained = []
    original = Trainer.save

    def save(self, *, must):
        trained[:] = [weight.detach().clone() for weight in self.parameters]
        original(self, must=must)
        assert all(map(torch.equal, trained, self.parameters))

    monkeypatch.setattr(Trainer, "save", save)
    run = train(small(CASES["ScheduleFreeAdamW"]), tmp_path / "run")
    snapshot = Snapshot.find(run.folder)
    model = snapshot.load_model(torch.device("cpu"))
    assert not all(map(torch.equal, trained, model.parameters()))
    dataset = snapshot.open_data()
    sequences = validation_sequences(dataset.validation, 16, snapshot.config.measure.validation_sequences)
    loss, _ = validation_loss(model, torch.from_numpy(sequences), 4, ALONE)
    assert loss == pytest.approx(run.metrics("validation")[-1]["loss"], abs=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pytorch-optimizer:AdaHessian", "AdaHessian could not step without second derivatives"),
        ("torch:LBFGS", "LBFGS recomputes the loss within its step, at other weights"),
        ("torch:SparseAdam", "SparseAdam could not step the weights of this model"),
    ],
)
def test_unsupported_optimizers_are_refused_in_the_first_step(name, match, small, tmp_path):
    with pytest.raises(ValueError, match=match):
        train(small(OptimizerConfig(name=name, lr=0.1)), tmp_path / "run")


class Confused(torch.optim.SGD):
    """Raises what an optimizer may raise on weights that it does not support."""

    def step(self):
        raise self.complaint


@pytest.mark.parametrize("complaint", [RuntimeError("odd shapes"), KeyError("pair")])
def test_errors_of_library_optimizers_are_explained(complaint, small, tmp_path, monkeypatch):
    monkeypatch.setattr(Confused, "complaint", complaint, raising=False)
    config = small(OptimizerConfig(name="any_mine:Confused", lr=0.1))
    with pytest.raises(type(complaint)):  # its author wants to see where
        train(config, tmp_path / "confused")
    monkeypatch.setattr(Confused, "__module__", "pytorch_optimizer.optimizer.confused")
    with pytest.raises(ValueError, match=r"Confused could not step the weights.*--optimizer\.rest adamw"):
        train(config, tmp_path / "by others")
