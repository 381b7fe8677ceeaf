"""Search spaces: found from signatures, alike for all, changed by the user; their points."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.optim import Optimizer

from merit_lab.models import PRESETS
from merit_lab.study.contestant import Contestant
from merit_lab.study.fields import with_values
from merit_lab.study.space import point, space_of
from merit_lab.train import OptimizerConfig, TrainConfig
from merit_optim import compose

BASE = TrainConfig(data=Path("data"), model=PRESETS["tiny"], batch=64, steps=200)


class Foreign(Optimizer):
    """An optimizer as any library may have it."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), shampoo_beta=0.95, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": (*betas, shampoo_beta), "decay": weight_decay})


def composed(params, lr=0.01, weight_decay=0.1, momentum=0.9):
    return compose(
        params, direction="muon", hold="cautious", lr=lr, weight_decay=weight_decay, momentum=momentum
    )


def axes(text: str, *changes: str, base: TrainConfig = BASE) -> dict[str, tuple[float, float]]:
    space = space_of(Contestant.parse(text), base, changes)
    return {axis.name: (axis.low, axis.high) for axis in space.axes}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adamw", "lr warmup beta1 beta2 weight_decay"),
        ("muon-merit", "lr rate_scale warmup momentum weight_decay"),
        ("soap", "lr rate_scale warmup beta1 beta2 weight_decay"),
        ("torch:SGD", "lr warmup momentum weight_decay"),
        ("torch:Muon,rest=adamw", "lr rest_lr warmup momentum weight_decay"),
        ("test_space:Foreign", "lr warmup beta1 beta2 weight_decay"),
        ("test_space:composed", "lr warmup momentum weight_decay"),
        ("adamw,betas=0.9,0.99", "lr warmup weight_decay"),
        ("muon,momentum=0.9,rate_scale=2", "lr rate_scale warmup weight_decay"),
    ],
)
def test_the_axes_are_those_of_the_signature_that_are_not_given(text: str, expected: str) -> None:
    assert list(axes(text)) == expected.split()


def test_spaces_are_alike() -> None:
    adamw, merit, muon = axes("adamw"), axes("merit"), axes("muon-merit")
    assert {high / low for low, high in (adamw["lr"], merit["lr"], muon["lr"], muon["rate_scale"])} == {16.0}
    assert adamw["beta1"] == merit["beta1"] == muon["momentum"]
    assert adamw["warmup"] == (0.1, 0.5)
    assert axes("adamw", base=replace(BASE, steps=100))["warmup"] == (0.2, 0.5)  # 20 steps at least


def test_points_depend_on_seed_and_number_alone() -> None:
    adamw, muon = (space_of(Contestant.parse(text), BASE).axes for text in ("adamw", "muon-merit"))
    shares = [
        [point(chosen, 3, number)["lr"] / chosen[0].low for number in range(1, 30)]
        for chosen in (adamw, muon)
    ]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)
    assert len(set(shares[0])) == 29
    assert min(shares[0]) < 2
    assert max(shares[0]) > 8
    assert [point(adamw, 3, number) for number in range(30)][7] == point(adamw, 3, 7)
    assert point(adamw, 4, 7) != point(adamw, 3, 7)
    assert point(adamw, 3, 0)["lr"] == OptimizerConfig(name="adamw").resolve(BASE.model).lr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adamw", {"betas": (0.8, 0.99)}),
        ("muon", {"options": ("momentum=0.8",), "rate_scale": 2.0}),
        ("pytorch-optimizer:Adan", {"options": ("betas=0.8,0.92,0.99",)}),
    ],
)
def test_settings_are_those_of_the_optimizer(text: str, expected: dict[str, object]) -> None:
    space = space_of(Contestant.parse(text), BASE)
    values = {"lr": 0.01, "rate_scale": 2.0, "warmup": 0.2, "momentum": 0.8, "beta1": 0.8, "beta2": 0.99}
    mine = {axis.name: values.get(axis.name, 0.05) for axis in space.axes}
    config = with_values(space.base, space.settings(mine)).optimizer
    assert (config.lr, config.warmup, config.weight_decay) == (0.01, 0.2, 0.05)
    for name, value in expected.items():
        found = getattr(config, name)
        assert (tuple(sorted(found)) if name == "options" else found) == value


def test_changes_are_for_one_or_for_all() -> None:
    assert axes("torch:SGD", "torch:SGD.lr=0.01:1", "lr=0.1:0.2", "warmup=0.1")["lr"] == (0.01, 1.0)
    assert axes("adamw", "torch:SGD.lr=0.01:1", "lr=0.1:0.2", "momentum=0.9")["lr"] == (0.1, 0.2)
    assert axes("test_space:Foreign", "test_space:Foreign.shampoo_beta=0.9:0.99")["shampoo_beta"] == (
        0.9,
        0.99,
    )
    assert axes("muon,lr=0.02")["lr"] == (0.02, 0.02)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("adamw", "adamw.momentum=0.9", "momentum, which adamw does not have; it has lr, warmup, beta1"),
        ("adamw", "adamw.lr=1:0.1", "lr from 1 to 0.1; the values must be above 0, the lower first"),
        ("muon", "muon.rest_lr=0.1:1", "rest_lr, which muon does not have; it has lr, rate_scale"),
        ("adamw", "beta1=0.9:1", "beta1 from 0.9 to 1; the values must be above 0 and below 1"),
        ("adamw", "warmup=0.1:2", "warmup from 0.1 to 2; the values must be above 0 and at most 1"),
        ("adamw", "lr", "cannot parse --space 'lr'; write NAME.AXIS=LOW:HIGH"),
    ],
)
def test_changes_that_make_no_sense_are_refused(text: str, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        axes(text, change)


def test_a_rate_that_nobody_knows_must_be_given() -> None:
    with pytest.raises(ValueError, match="has no default learning rate; say between which rates"):
        axes("test_space:NoRate")
    assert axes("test_space:NoRate", "test_space:NoRate.lr=0.1:1")["lr"] == (0.1, 1.0)


class NoRate(Foreign):
    def __init__(self, params, lr):
        super().__init__(params, lr)
